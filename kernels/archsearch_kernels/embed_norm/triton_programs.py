# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the embedding: gather, drop and norm forward; sorted sums backward.

Offsets that grow with members, places or the vocabulary are 64-bit. What stands in `residual_norm`
about tiles holds here.

Shape suffixes: M members, N places, V vocabulary, D width, P padded width; R rows of a block: of
places forward, of the vocabulary backward.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.residual_norm.triton_programs import unit


@triton.jit
def hash32(x):
    """Wellons' `lowbias32` of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def factor(place_R, key, threshold, scale, D: tl.constexpr, P: tl.constexpr):
    """What each feature of these places is multiplied by: 0 or `scale`."""
    index_RP = place_R.to(tl.int64)[:, None] * D + tl.arange(0, P)[None, :]
    hashed_RP = hash32(index_RP.to(tl.uint32) + hash32(key.to(tl.uint32)))
    return tl.where(hashed_RP.to(tl.int64) < threshold, 0.0, scale)


@triton.jit(do_not_specialize=["N", "threshold"])
def forward(
    tokens,
    table,
    weight,
    bias,
    keys,
    r_MND,
    x_MND,
    N,
    table_m,
    table_v,
    weight_m,
    bias_m,
    epsilon,
    threshold,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    CENTRED: tl.constexpr,
    DROPS: tl.constexpr,
):
    """R places of one member."""
    m, d_P = tl.program_id(1).to(tl.int64), tl.arange(0, P)
    place_R, exists_P = tl.program_id(0) * R + tl.arange(0, R), d_P < D
    exists_RP = (place_R < N)[:, None] & exists_P[None, :]
    token_R = tl.load(tokens + place_R, mask=place_R < N, other=0)
    from_RP = table + m * table_m + token_R[:, None] * table_v + d_P[None, :]
    r_RP = tl.load(from_RP, mask=exists_RP, other=0.0).to(tl.float32)
    if DROPS:
        r_RP *= factor(place_R, tl.load(keys + m), threshold, scale, D, P)
    narrow_RP = r_RP.to(r_MND.dtype.element_ty)
    at_RP = (m * N + place_R)[:, None] * D + d_P[None, :]
    tl.store(r_MND + at_RP, narrow_RP, mask=exists_RP)
    unit_RP, _ = unit(narrow_RP.to(tl.float32), exists_P, epsilon, D, CENTRED)
    weight_P = tl.load(weight + m * weight_m + d_P, mask=exists_P, other=0.0).to(tl.float32)
    x_RP = unit_RP * weight_P[None, :]
    if CENTRED:
        x_RP += tl.load(bias + m * bias_m + d_P, mask=exists_P, other=0.0).to(tl.float32)[None, :]
    tl.store(x_MND + at_RP, x_RP, mask=exists_RP)


@triton.jit(do_not_specialize=["N", "V", "threshold"])
def gradient(
    d_r,
    order,
    first_V1,
    keys,
    d_table_MVD,
    N,
    V,
    threshold,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    DROPS: tl.constexpr,
):
    """R tokens of one member: the sum over the places of each, in their order."""
    m, d_P = tl.program_id(1).to(tl.int64), tl.arange(0, P)
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    begin_R = tl.load(first_V1 + token_R, mask=token_R < V, other=0)
    end_R = tl.load(first_V1 + token_R + 1, mask=token_R < V, other=0)
    sum_RP = tl.zeros([R, P], tl.float32)
    for i in range(0, tl.max(end_R - begin_R, 0)):
        is_one_R = begin_R + i < end_R
        place_R = tl.load(order + begin_R + i, mask=is_one_R, other=0)
        exists_RP = is_one_R[:, None] & (d_P < D)[None, :]
        at_RP = (m * N + place_R)[:, None] * D + d_P[None, :]
        d_RP = tl.load(d_r + at_RP, mask=exists_RP, other=0.0).to(tl.float32)
        if DROPS:
            d_RP *= factor(place_R, tl.load(keys + m), threshold, scale, D, P)
        sum_RP += d_RP
    exists_RP = (token_R < V)[:, None] & (d_P < D)[None, :]
    at_RP = (m * V + token_R)[:, None] * D + d_P[None, :]
    tl.store(d_table_MVD + at_RP, sum_RP, mask=exists_RP)
