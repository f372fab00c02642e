# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs for short sequences, which go through all pairs of tokens and make no features.

    s_ij = q_i . k_j        w_ij = s^2/2 + ROOT s + K        (K times what the package defines)
    dw_ij = g_i . v_j + r_i                                   dt_ij = dw_ij (s_ij + ROOT)
    dq_i = sum_j dt_ij k_j        dk_j = sum_i dt_ij q_i      dv_j = sum_i w_ij g_i

with g and r as `backward_programs` has them. A query reads the keys up to its place: its own
number, or where there are PLACES what stands there, so that queries may be few, in any order.

Shape suffixes: T keys, S queries, H heads, V value size; C queries and N keys of a block, D padded
key size, W padded value size inside programs.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.taylor_linear_attention.tiles import (
    EPSILON,
    load_numbers,
    load_rows,
    store_rows,
)


@triton.jit
def _places(at, s0, at_s, S, C: tl.constexpr, PLACES: tl.constexpr):
    """The place of each query of a block; -1 behind the last."""
    row_C = tl.arange(0, C)
    if PLACES:
        from_C = at + tl.cast(s0, tl.int64) * at_s + row_C * at_s
        place_C = tl.load(from_C, mask=row_C < S - s0, other=-1).to(tl.int32)
    else:
        place_C = tl.where(row_C < S - s0, s0 + row_C, -1)
    return place_C


@triton.jit(do_not_specialize=["T", "S"])
def outputs(
    q, k, v, exists, at, y, denominator, T, S, H, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, e_b,
    e_t, at_b, at_s, ROOT: tl.constexpr, CONSTANT: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PLACES: tl.constexpr,
    OPERAND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs and denominators of one block of queries."""
    blocks = tl.cdiv(S, C)
    row, s0 = tl.program_id(0) // blocks, tl.program_id(0) % blocks * C
    h, b = row % H, tl.cast(row // H, tl.int64)
    k, v, exists = k + b * k_b + h * k_h, v + b * v_b + h * v_h, exists + b * e_b
    q_CD = load_rows(q + b * q_b + h * q_h, s0, q_t, S, D, D, C, False, OPERAND)
    place_C = _places(at + b * at_b, s0, at_s, S, C, PLACES)
    y_CW = tl.zeros([C, W], tl.float32)
    total_C = tl.zeros([C], tl.float32) + CONSTANT * EPSILON
    for t0 in tl.range(0, tl.max(place_C, 0) + 1, N, num_stages=STAGES):
        k_ND = load_rows(k, t0, k_t, T, D, D, N, False, OPERAND)
        v_NW = load_rows(v, t0, v_t, T, V, W, N, False, OPERAND)
        sees_CN = place_C[:, None] >= (t0 + tl.arange(0, N))[None, :]
        if MASKED:
            sees_CN = sees_CN & (load_numbers(exists, t0, e_t, T, N, True) > 0)[None, :]
        score_CN = tl.dot(q_CD, tl.trans(k_ND), input_precision="ieee")
        weight_CN = tl.where(sees_CN, score_CN * (score_CN * 0.5 + ROOT) + CONSTANT, 0.0)
        total_C += tl.sum(weight_CN, 1)
        y_CW = tl.dot(weight_CN.to(OPERAND), v_NW, y_CW, input_precision="ieee")
    start = b * S * H + h
    store_rows(y + start * V, y_CW * (1.0 / total_C)[:, None], s0, H * V, S, V, W, C)
    at_C = (s0 + tl.arange(0, C)).to(tl.int64) * H + start
    tl.store(denominator + at_C, total_C, mask=place_C >= 0)


@triton.jit(do_not_specialize=["T", "S"])
def query_gradients(
    q, k, v, g, r, exists, at, dq, T, S, H, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, e_b, e_t,
    at_b, at_s, ROOT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PLACES: tl.constexpr,
    OPERAND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries."""
    blocks = tl.cdiv(S, C)
    row, s0 = tl.program_id(0) // blocks, tl.program_id(0) % blocks * C
    h, b = row % H, tl.cast(row // H, tl.int64)
    k, v, exists = k + b * k_b + h * k_h, v + b * v_b + h * v_h, exists + b * e_b
    start = b * S * H + h
    q_CD = load_rows(q + b * q_b + h * q_h, s0, q_t, S, D, D, C, False, OPERAND)
    g_CW = load_rows(g + start * V, s0, H * V, S, V, W, C, False, OPERAND)
    r_C = load_numbers(r + start, s0, H, S, C, True)
    place_C = _places(at + b * at_b, s0, at_s, S, C, PLACES)
    d_CD = tl.zeros([C, D], tl.float32)
    for t0 in tl.range(0, tl.max(place_C, 0) + 1, N, num_stages=STAGES):
        k_ND = load_rows(k, t0, k_t, T, D, D, N, False, OPERAND)
        v_NW = load_rows(v, t0, v_t, T, V, W, N, False, OPERAND)
        sees_CN = place_C[:, None] >= (t0 + tl.arange(0, N))[None, :]
        if MASKED:
            sees_CN = sees_CN & (load_numbers(exists, t0, e_t, T, N, True) > 0)[None, :]
        score_CN = tl.dot(q_CD, tl.trans(k_ND), input_precision="ieee")
        d_CN = tl.dot(g_CW, tl.trans(v_NW), input_precision="ieee") + r_C[:, None]
        d_CN = tl.where(sees_CN, d_CN * (score_CN + ROOT), 0.0)
        d_CD = tl.dot(d_CN.to(OPERAND), k_ND, d_CD, input_precision="ieee")
    store_rows(dq + start * K, d_CD, s0, H * K, S, K, D, C)


@triton.jit(do_not_specialize=["T", "S"])
def key_gradients(
    q, k, v, g, r, exists, at, dk, dv, T, S, H, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, e_b,
    e_t, at_b, at_s, ROOT: tl.constexpr, CONSTANT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr, C: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    PLACES: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys."""
    blocks = tl.cdiv(T, N)
    row, t0 = tl.program_id(0) // blocks, tl.program_id(0) % blocks * N
    h, b = row % H, tl.cast(row // H, tl.int64)
    start = b * S * H + h
    q, g, r, at = q + b * q_b + h * q_h, g + start * V, r + start, at + b * at_b
    k_ND = load_rows(k + b * k_b + h * k_h, t0, k_t, T, D, D, N, False, OPERAND)
    v_NW = load_rows(v + b * v_b + h * v_h, t0, v_t, T, V, W, N, False, OPERAND)
    place_N = t0 + tl.arange(0, N)
    exists_N = load_numbers(exists + b * e_b, t0, e_t, T, N, MASKED) > 0
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_NW = tl.zeros([N, W], tl.float32)
    first = 0 if PLACES else t0 // C * C  # in order, earlier queries see none of these keys
    for s0 in tl.range(first, S, C, num_stages=STAGES):
        q_CD = load_rows(q, s0, q_t, S, D, D, C, False, OPERAND)
        g_CW = load_rows(g, s0, H * V, S, V, W, C, False, OPERAND)
        r_C = load_numbers(r, s0, H, S, C, True)
        place_C = _places(at, s0, at_s, S, C, PLACES)
        seen_NC = (place_N[:, None] <= place_C[None, :]) & exists_N[:, None]
        score_NC = tl.dot(k_ND, tl.trans(q_CD), input_precision="ieee")
        weight_NC = tl.where(seen_NC, score_NC * (score_NC * 0.5 + ROOT) + CONSTANT, 0.0)
        dv_NW = tl.dot(weight_NC.to(OPERAND), g_CW, dv_NW, input_precision="ieee")
        d_NC = tl.dot(v_NW, tl.trans(g_CW), input_precision="ieee") + r_C[None, :]
        d_NC = tl.where(seen_NC, d_NC * (score_NC + ROOT), 0.0)
        dk_ND = tl.dot(d_NC.to(OPERAND), q_CD, dk_ND, input_precision="ieee")
    start = b * T * H + h
    store_rows(dk + start * K, dk_ND, t0, H * K, T, K, D, N)
    store_rows(dv + start * V, dv_NW, t0, H * V, T, V, W, N)
