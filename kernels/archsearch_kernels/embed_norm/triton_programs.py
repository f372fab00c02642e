# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the embedding: gather, drop and norm forward; sorted sums backward.

Offsets that grow with members, places or the vocabulary are 64-bit. What stands in `residual_norm`
about tiles holds here.

Shape suffixes: M members, N places, V vocabulary, D width, P padded width; R places of a block, S
slices of L sorted places each.
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


@triton.jit
def terms(
    d_r, order, keys, m, at_R, exists_R, N, threshold, scale,
    D: tl.constexpr, P: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """What the sorted places at_R, those that exist, add to the gradients of their tokens."""
    place_R = tl.load(order + at_R, mask=exists_R, other=0)
    exists_RP = exists_R[:, None] & (tl.arange(0, P) < D)[None, :]
    at_RP = (m * N + place_R)[:, None] * D + tl.arange(0, P)[None, :]
    d_RP = tl.load(d_r + at_RP, mask=exists_RP, other=0.0).to(tl.float32)
    if DROPS:
        d_RP *= factor(place_R, tl.load(keys + m), threshold, scale, D, P)
    return d_RP


@triton.jit(do_not_specialize=["N", "threshold"])
def slices(
    d_r,
    sorted_N,
    order,
    keys,
    parts_MSD,
    N,
    threshold,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    DROPS: tl.constexpr,
):
    """The sum over one slice of the sorted places of one member, if they are all of one token.

    Other slices are left as they are: `gradient` reads none of them.
    """
    m, s, d_P = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, P)
    begin = s * L
    if tl.load(sorted_N + begin) == tl.load(sorted_N + begin + L - 1):
        sum_RP = tl.zeros([R, P], tl.float32)
        for i in range(begin, begin + L, R):
            at_R = i + tl.arange(0, R)
            exists_R = at_R < begin + L
            sum_RP += terms(
                d_r, order, keys, m, at_R, exists_R, N, threshold, scale, D, P, DROPS
            )  # fmt: skip
        at_P = (m * tl.num_programs(0) + s) * D + d_P
        tl.store(parts_MSD + at_P, tl.sum(sum_RP, 0), mask=d_P < D)


@triton.jit
def _sum_of_many(
    d_r, order, keys, parts_MSD, m, begin, end, N, threshold, scale,
    D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, L: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """The sum over the sorted places from `begin` to `end` of one token, R at a time.

    Whole slices of its places, from `whole` to `after`, were summed by `slices`; what is left are
    fewer than 2 L places. So a token that fills most of a batch holds nobody up.
    """
    whole, after, d_P = (begin + L - 1) // L, end // L, tl.arange(0, P)
    skipped = tl.maximum(after - whole, 0) * L
    sum_RP = tl.zeros([R, P], tl.float32)
    for i in range(begin, end - skipped, R):
        at_R = i + tl.arange(0, R)
        at_R = tl.where(at_R < whole * L, at_R, at_R + skipped)
        sum_RP += terms(d_r, order, keys, m, at_R, at_R < end, N, threshold, scale, D, P, DROPS)
    for s in range(whole, after, R):
        slice_R = s + tl.arange(0, R)
        exists_RP = (slice_R < after)[:, None] & (d_P < D)[None, :]
        at_RP = (m * (N // L) + slice_R)[:, None] * D + d_P[None, :]
        sum_RP += tl.load(parts_MSD + at_RP, mask=exists_RP, other=0.0)
    return tl.sum(sum_RP, 0)


@triton.jit(do_not_specialize=["N", "V", "threshold"])
def gradient(
    d_r,
    order,
    first_V1,
    keys,
    parts_MSD,
    d_table_MVD,
    N,
    V,
    threshold,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    FEW: tl.constexpr,
    DROPS: tl.constexpr,
):
    """R tokens of one member: the sum over the places of each, in a fixed order.

    Tokens of a FEW places at most, which are nearly all, go side by side, a place of each at a
    time. The others follow one by one.
    """
    m, d_P, t0 = tl.program_id(1).to(tl.int64), tl.arange(0, P), tl.program_id(0) * R
    token_R = t0 + tl.arange(0, R)
    exists_R = token_R < V
    begin_R = tl.load(first_V1 + token_R, mask=exists_R, other=0)
    count_R = tl.load(first_V1 + token_R + 1, mask=exists_R, other=0) - begin_R
    is_few_R = count_R <= FEW
    sum_RP = tl.zeros([R, P], tl.float32)
    for i in range(tl.max(tl.where(is_few_R, count_R, 0), 0)):
        left_R = is_few_R & (i < count_R)
        sum_RP += terms(d_r, order, keys, m, begin_R + i, left_R, N, threshold, scale, D, P, DROPS)
    at_RP = (m * V + token_R)[:, None] * D + d_P[None, :]
    tl.store(d_table_MVD + at_RP, sum_RP, mask=(is_few_R & exists_R)[:, None] & (d_P < D)[None, :])
    if tl.max(count_R, 0) > FEW:
        for token in range(t0, tl.minimum(t0 + R, V)):
            begin, end = tl.load(first_V1 + token), tl.load(first_V1 + token + 1)
            if end - begin > FEW:
                sum_P = _sum_of_many(
                    d_r, order, keys, parts_MSD, m, begin, end, N, threshold, scale,
                    D, P, R, L, DROPS,
                )  # fmt: skip
                at_P = (m * V + token) * D + d_P
                tl.store(d_table_MVD + at_P, sum_P, mask=d_P < D)
