# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the residual norm; member, then row, then width lie in memory in this order.

A tile is R rows of P, the power of two at or above the width D; what is outside is zeros. The
backward program takes every so many-th block of rows, keeps what goes to weight and bias as tiles,
and sums over rows once, at its end. Offsets that grow with members or rows are 64-bit.

Shape suffixes: M members, N rows of each, D width, P padded width; R rows of a block, S programs of
one member.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def unit(x_RP, exists_P, epsilon, D: tl.constexpr, CENTRED: tl.constexpr):
    """Rows with mean 0 (if CENTRED) and mean square 1, and what they were multiplied by."""
    if CENTRED:
        mean_R = tl.sum(x_RP, 1) / D
        x_RP = tl.where(exists_P[None, :], x_RP - mean_R[:, None], 0.0)
    scale_R = 1.0 / tl.sqrt(tl.sum(x_RP * x_RP, 1) / D + epsilon)
    return x_RP * scale_R[:, None], scale_R


@triton.jit
def through_unit(d_unit_RP, unit_RP, scale_R, exists_P, D: tl.constexpr, CENTRED: tl.constexpr):
    """The gradient of what `unit` was given."""
    along_R = tl.sum(d_unit_RP * unit_RP, 1) / D
    d_RP = d_unit_RP - unit_RP * along_R[:, None]
    if CENTRED:
        d_RP -= tl.where(exists_P[None, :], (tl.sum(d_unit_RP, 1) / D)[:, None], 0.0)
    return d_RP * scale_R[:, None]


@triton.jit(do_not_specialize=["N"])
def forward(
    r,
    y,
    weight,
    bias,
    s_MND,
    x_MND,
    N,
    weight_m,
    bias_m,
    epsilon,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """R rows of one member."""
    m, d_P = tl.program_id(1).to(tl.int64), tl.arange(0, P)
    row_R, exists_P = tl.program_id(0) * R + tl.arange(0, R), d_P < D
    at_RP = (m * N + row_R)[:, None] * D + d_P[None, :]
    exists_RP = (row_R < N)[:, None] & exists_P[None, :]
    s_RP = tl.load(r + at_RP, mask=exists_RP, other=0.0).to(tl.float32)
    s_RP += tl.load(y + at_RP, mask=exists_RP, other=0.0).to(tl.float32)
    narrow_RP = s_RP.to(s_MND.dtype.element_ty)
    tl.store(s_MND + at_RP, narrow_RP, mask=exists_RP)
    unit_RP, _ = unit(narrow_RP.to(tl.float32), exists_P, epsilon, D, CENTRED)
    weight_P = tl.load(weight + m * weight_m + d_P, mask=exists_P, other=0.0).to(tl.float32)
    x_RP = unit_RP * weight_P[None, :]
    if CENTRED:
        x_RP += tl.load(bias + m * bias_m + d_P, mask=exists_P, other=0.0).to(tl.float32)[None, :]
    tl.store(x_MND + at_RP, x_RP, mask=exists_RP)


@triton.jit(do_not_specialize=["N"])
def backward(
    d_s,
    d_x,
    s,
    weight,
    d_MND,
    d_weight_MSD,
    d_bias_MSD,
    N,
    weight_m,
    epsilon,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Every S-th block of rows of one member, from program_id(0) on."""
    m, first, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    d_P = tl.arange(0, P)
    exists_P = d_P < D
    weight_P = tl.load(weight + m * weight_m + d_P, mask=exists_P, other=0.0).to(tl.float32)
    to_weight_RP = tl.zeros([R, P], tl.float32)
    to_bias_RP = tl.zeros([R, P], tl.float32)
    for n in range(first * R, N, programs * R):
        row_R = n + tl.arange(0, R)
        at_RP = (m * N + row_R)[:, None] * D + d_P[None, :]
        exists_RP = (row_R < N)[:, None] & exists_P[None, :]
        s_RP = tl.load(s + at_RP, mask=exists_RP, other=0.0).to(tl.float32)
        d_x_RP = tl.load(d_x + at_RP, mask=exists_RP, other=0.0).to(tl.float32)
        unit_RP, scale_R = unit(s_RP, exists_P, epsilon, D, CENTRED)
        to_weight_RP += d_x_RP * unit_RP
        to_bias_RP += d_x_RP
        d_unit_RP = d_x_RP * weight_P[None, :]
        d_RP = through_unit(d_unit_RP, unit_RP, scale_R, exists_P, D, CENTRED)
        d_RP += tl.load(d_s + at_RP, mask=exists_RP, other=0.0).to(tl.float32)
        tl.store(d_MND + at_RP, d_RP, mask=exists_RP)
    at_P = (m * programs + first) * D + d_P
    tl.store(d_weight_MSD + at_P, tl.sum(to_weight_RP, 0), mask=exists_P)
    if CENTRED:
        tl.store(d_bias_MSD + at_P, tl.sum(to_bias_RP, 0), mask=exists_P)
