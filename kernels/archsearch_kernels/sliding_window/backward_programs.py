# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the gradients of sliding-window attention.

As in `forward_programs`, blocks on a border are read with a mask, and those without by a loop of
their own. Scores are made again from the logarithm of each row's sum. Keys and values have a
program that reads the queries which see them, so that nothing is added by atomics.

Shape suffixes: M queries and N keys of a block, P padded key size, W padded value size.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.sliding_window.tiles import (
    LOG2E,
    NOWHERE,
    is_seen,
    key_blocks,
    keys_at,
    load_pair,
    load_rows,
    load_tile,
    place,
    query_blocks,
    store_tile,
)


@triton.jit
def _query_part(
    q_MP, dy_MW, log_M, delta_M, k_NP, v_NW, seen_MN, factor, dq_MP, CHECK: tl.constexpr
):
    """Add what one block of keys gives to the gradient of queries, but for the scale."""
    score_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision="ieee")
    p_MN = tl.exp2(score_MN * factor - log_M[:, None])
    if CHECK:
        p_MN = tl.where(seen_MN, p_MN, 0.0)
    dp_MN = tl.dot(dy_MW, tl.trans(v_NW), input_precision="ieee")
    ds_MN = p_MN * (dp_MN - delta_M[:, None])
    return tl.dot(ds_MN.to(k_NP.dtype), k_NP, dq_MP, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "S", "window"])
def query_gradients(
    q, k, v, exists, dy, y_BTHV, log_total_BHT, delta_BHT, dq_BTHK, T, S, window, H, scale, q_b,
    q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, exists_b, exists_s, dy_b, dy_t, dy_h,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr, EXISTS: tl.constexpr,
):  # fmt: skip
    """Gradient of M queries of one head, and delta = dy . y of each, for `key_gradients`."""
    block, b, h = place(T, H, M)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    first = S - T + block * M
    rows = tl.minimum(T - block * M, M)
    begin, left, borders, whole = key_blocks(first, first + rows, window, N, WHOLE)
    t = (block * M).to(tl.int64)
    q_MP = load_tile(q + b * q_b + h * q_h + t * q_t, row_M, 0, rows, q_t, K, P, True)
    dy_MW = load_tile(dy + b * dy_b + h * dy_h + t * dy_t, row_M, 0, rows, dy_t, V, W, True)
    y_MW = load_tile(y_BTHV + ((b * T + t) * H + h) * V, row_M, 0, rows, H * V, V, W, True)
    delta_M = tl.sum(dy_MW.to(tl.float32) * y_MW.to(tl.float32), 1)
    at_M = (b * H + h) * T + t + row_M
    tl.store(delta_BHT + at_M, delta_M, mask=row_M < rows)
    log_M = tl.load(log_total_BHT + at_M, mask=row_M < rows, other=float("inf"))
    k += b * k_b + h // GROUP * k_g
    v += b * v_b + h // GROUP * v_g
    exists += b * exists_b
    factor = scale * LOG2E
    dq_MP = tl.zeros([M, P], tl.float32)
    for j in range(borders):
        start = begin + (j + tl.where(j < left, 0, whole)) * N
        k_NP, v_NW = load_pair(k, v, start, column_N, -start, S - start, k_s, v_s, K, V, P, W, True)
        key_N = keys_at(exists, start + column_N, S, exists_s, EXISTS)
        seen_MN = is_seen((first + row_M)[:, None], key_N[None, :], window)
        dq_MP = _query_part(q_MP, dy_MW, log_M, delta_M, k_NP, v_NW, seen_MN, factor, dq_MP, True)
    if WHOLE:
        for j in range(left, left + whole):
            start = begin + j * N
            k_NP, v_NW = load_pair(k, v, start, column_N, 0, N, k_s, v_s, K, V, P, W, False)
            seen_MN = True
            if EXISTS:
                at_N = exists + (start + column_N).to(tl.int64) * exists_s
                seen_MN = (tl.load(at_N) != 0)[None, :]
            dq_MP = _query_part(
                q_MP, dy_MW, log_M, delta_M, k_NP, v_NW, seen_MN, factor, dq_MP, EXISTS
            )
    store_tile(dq_BTHK + ((b * T + t) * H + h) * K, row_M, rows, H * K, dq_MP * scale, K, P)


@triton.jit
def _key_part(
    k_NP, v_NW, q_MP, dy_MW, log_M, delta_M, seen_NM, factor, dk_NP, dv_NW, CHECK: tl.constexpr
):
    """Add what one block of queries gives to the gradients of keys (but for the scale) and values.

    Everything is turned, keys in rows, so that no product takes a turned accumulator.
    """
    score_NM = tl.dot(k_NP, tl.trans(q_MP), input_precision="ieee")
    p_NM = tl.exp2(score_NM * factor - log_M[None, :])
    if CHECK:
        p_NM = tl.where(seen_NM, p_NM, 0.0)
    dv_NW = tl.dot(p_NM.to(dy_MW.dtype), dy_MW, dv_NW, input_precision="ieee")
    dp_NM = tl.dot(v_NW, tl.trans(dy_MW), input_precision="ieee")
    ds_NM = p_NM * (dp_NM - delta_M[None, :])
    dk_NP = tl.dot(ds_NM.to(q_MP.dtype), q_MP, dk_NP, input_precision="ieee")
    return dk_NP, dv_NW


@triton.jit(do_not_specialize=["T", "S", "window"])
def key_gradients(
    q, k, v, exists, dy, log_total_BHT, delta_BHT, dk_BSGK, dv_BSGV, T, S, window, G, scale,
    q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, exists_b, exists_s, dy_b, dy_t, dy_h,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr, EXISTS: tl.constexpr,
):  # fmt: skip
    """Gradients of N keys and values of a head, summed in order over query heads that read it."""
    block, b, g = place(S, G, N)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    first = block * N
    columns = tl.minimum(S - first, N)
    older = S - T
    begin, left, borders, whole = query_blocks(first, first + columns, older, S, window, M, WHOLE)
    s = first.to(tl.int64)
    k_NP = load_tile(k + b * k_b + g * k_g + s * k_s, column_N, 0, columns, k_s, K, P, True)
    v_NW = load_tile(v + b * v_b + g * v_g + s * v_s, column_N, 0, columns, v_s, V, W, True)
    factor = scale * LOG2E
    dk_NP = tl.zeros([N, P], tl.float32)
    dv_NW = tl.zeros([N, W], tl.float32)
    for r in range(GROUP):
        h = g * GROUP + r
        rows = (b * G * GROUP + h) * T
        of_log, of_delta = log_total_BHT + rows, delta_BHT + rows
        of_q, of_dy = q + b * q_b + h * q_h, dy + b * dy_b + h * dy_h
        for j in range(borders):
            t = begin - older + (j + tl.where(j < left, 0, whole)) * M
            q_MP, dy_MW = load_pair(of_q, of_dy, t, row_M, 0, T - t, q_t, dy_t, K, V, P, W, True)
            log_M, delta_M = load_rows(of_log, of_delta, t, row_M, T - t, True)
            seen_NM = is_seen((older + t + row_M)[None, :], (first + column_N)[:, None], window)
            dk_NP, dv_NW = _key_part(
                k_NP, v_NW, q_MP, dy_MW, log_M, delta_M, seen_NM, factor, dk_NP, dv_NW, True
            )
        if WHOLE:
            for j in range(left, left + whole):
                t = begin - older + j * M
                q_MP, dy_MW = load_pair(of_q, of_dy, t, row_M, 0, M, q_t, dy_t, K, V, P, W, False)
                log_M, delta_M = load_rows(of_log, of_delta, t, row_M, M, False)
                dk_NP, dv_NW = _key_part(
                    k_NP, v_NW, q_MP, dy_MW, log_M, delta_M, True, factor, dk_NP, dv_NW, False
                )
    if EXISTS:  # what is no key has weights of any size, in rows of its own
        key_N = keys_at(exists + b * exists_b, first + column_N, S, exists_s, True)
        dk_NP = tl.where((key_N < NOWHERE)[:, None], dk_NP, 0.0)
        dv_NW = tl.where((key_N < NOWHERE)[:, None], dv_NW, 0.0)
    at = (b * S + s) * G + g
    store_tile(dk_BSGK + at * K, column_N, columns, G * K, dk_NP * scale, K, P)
    store_tile(dv_BSGV + at * V, column_N, columns, G * V, dv_NW, V, W)
