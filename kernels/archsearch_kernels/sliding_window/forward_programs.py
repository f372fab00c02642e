# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton program of sliding-window attention, forward.

A program holds a block of queries and reads the blocks of keys that its window meets. Blocks on a
border, where some query does not see some key, are read first, with a mask; those that all queries
see all of are read by a loop of their own, without. WHOLE says whether there may be such blocks,
EXISTS whether some keys do not exist. Scores are never stored. Exponentials are to base 2, which is
what the hardware has.

Shape suffixes: M queries and N keys of a block, P padded key size, W padded value size.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.sliding_window.tiles import (
    LOG2E,
    LOWEST,
    is_seen,
    key_blocks,
    keys_at,
    load_pair,
    load_tile,
    place,
    store_tile,
)


@triton.jit
def _absorb(q_MP, k_NP, v_NW, seen_MN, factor, best_M, total_M, sum_MW, CHECK: tl.constexpr):
    """Take one more block of keys into the running maximum and sums."""
    score_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision="ieee")
    if CHECK:
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
    new_M = tl.maximum(best_M, tl.max(score_MN, 1) * factor)
    p_MN = tl.exp2(score_MN * factor - new_M[:, None])
    shrink_M = tl.exp2(best_M - new_M)
    total_M = total_M * shrink_M + tl.sum(p_MN, 1)
    sum_MW = tl.dot(p_MN.to(v_NW.dtype), v_NW, sum_MW * shrink_M[:, None], input_precision="ieee")
    return new_M, total_M, sum_MW


@triton.jit(do_not_specialize=["T", "S", "window"])
def forward(
    q, k, v, exists, y_BTHV, log_total_BHT, T, S, window, H, scale, q_b, q_t, q_h, k_b, k_s,
    k_g, v_b, v_s, v_g, exists_b, exists_s, GROUP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, P: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WHOLE: tl.constexpr, EXISTS: tl.constexpr,
):  # fmt: skip
    """Outputs of M queries of one head, and log2 of each row's sum: infinite if it sees nothing."""
    block, b, h = place(T, H, M)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    first = S - T + block * M
    rows = tl.minimum(T - block * M, M)
    begin, left, borders, whole = key_blocks(first, first + rows, window, N, WHOLE)
    t = (block * M).to(tl.int64)
    q_MP = load_tile(q + b * q_b + h * q_h + t * q_t, row_M, 0, rows, q_t, K, P, True)
    k += b * k_b + h // GROUP * k_g
    v += b * v_b + h // GROUP * v_g
    exists += b * exists_b
    factor = scale * LOG2E
    best_M = tl.full([M], LOWEST, tl.float32)
    total_M = tl.zeros([M], tl.float32)
    sum_MW = tl.zeros([M, W], tl.float32)
    for j in range(borders):
        start = begin + (j + tl.where(j < left, 0, whole)) * N
        k_NP, v_NW = load_pair(k, v, start, column_N, -start, S - start, k_s, v_s, K, V, P, W, True)
        key_N = keys_at(exists, start + column_N, S, exists_s, EXISTS)
        seen_MN = is_seen((first + row_M)[:, None], key_N[None, :], window)
        best_M, total_M, sum_MW = _absorb(
            q_MP, k_NP, v_NW, seen_MN, factor, best_M, total_M, sum_MW, True
        )
    if WHOLE:
        for j in range(left, left + whole):
            start = begin + j * N
            k_NP, v_NW = load_pair(k, v, start, column_N, 0, N, k_s, v_s, K, V, P, W, False)
            seen_MN = True
            if EXISTS:
                at_N = exists + (start + column_N).to(tl.int64) * exists_s
                seen_MN = (tl.load(at_N) != 0)[None, :]
            best_M, total_M, sum_MW = _absorb(
                q_MP, k_NP, v_NW, seen_MN, factor, best_M, total_M, sum_MW, EXISTS
            )
    sees_M = total_M > 0
    total_M = tl.where(sees_M, total_M, 1.0)
    log_M = tl.where(sees_M, best_M + tl.log2(total_M), float("inf"))
    tl.store(log_total_BHT + (b * H + h) * T + t + row_M, log_M, mask=row_M < rows)
    y_MW = sum_MW / total_M[:, None]
    store_tile(y_BTHV + ((b * T + t) * H + h) * V, row_M, rows, H * V, y_MW, V, W)
