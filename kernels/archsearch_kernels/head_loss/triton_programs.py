# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the head: one pass forward, one recomputing pass backward, and hits.

Scores are never stored. The forward program of R rows reads the vocabulary C columns at a time and
keeps, as attention does, the running maximum, the sum of exponentials and the sum of p_v E_v. The
backward program of C columns reads the rows R at a time and makes the scores again. Logarithms
are to base 2, which is what the hardware has. Offsets that grow with M, N or V are 64-bit.

A tile is P wide, the power of two at or above the width D. What lies outside of it in a matrix is
read as zeros, and CHECK says whether a tile may reach over the last row or column.

Shape suffixes: M members, N labelled rows, D width, V vocabulary; R rows of a block, C columns of
the vocabulary of a block, P padded width, S splits.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(first, row_R, limit, stride, D: tl.constexpr, P: tl.constexpr, CHECK: tl.constexpr):
    """Rows of a matrix whose row 0 begins at `first`; rows from `limit` on are zeros."""
    d_P = tl.arange(0, P)
    at_RP = first + row_R[:, None] * stride + d_P[None, :]
    if CHECK or D != P:
        tile_RP = tl.load(at_RP, mask=(row_R < limit)[:, None] & (d_P < D)[None, :], other=0.0)
    else:
        tile_RP = tl.load(at_RP)
    return tile_RP


@triton.jit
def _absorb(hidden_RP, head_CP, columns, best_R, total_R, sum_RP, CHECK: tl.constexpr):
    """Take one more block of the vocabulary into the running maximum and sums.

    `columns` of the block exist.
    """
    score_RC = tl.dot(hidden_RP, tl.trans(head_CP), input_precision="ieee")
    if CHECK:
        exists_C = tl.arange(0, head_CP.shape[0]) < columns
        score_RC = tl.where(exists_C[None, :], score_RC, float("-inf"))
    new_R = tl.maximum(best_R, tl.max(score_RC, 1))
    p_RC = tl.exp2(score_RC * LOG2E - (new_R * LOG2E)[:, None])
    shrink_R = tl.exp2((best_R - new_R) * LOG2E)
    total_R = total_R * shrink_R + tl.sum(p_RC, 1)
    sum_RP = tl.dot(
        p_RC.to(head_CP.dtype), head_CP, sum_RP * shrink_R[:, None], input_precision="ieee"
    )
    return new_R, total_R, sum_RP


@triton.jit
def _finish(
    hidden_RP,
    best_R,
    total_R,
    sum_RP,
    head,
    labels,
    weights,
    loss,
    log_total,
    d_hidden,
    row_R,
    first_row,
    N,
    head_stride,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Loss, log2 of the sum of exponentials, and gradient of R rows, from their sums.

    `head` is the member's; `first_row` is its row 0 among the rows of all members.
    """
    exists_R, d_P = row_R < N, tl.arange(0, P)
    label_R = tl.load(labels + row_R, mask=exists_R, other=0)
    at_RP = head + label_R[:, None] * head_stride + d_P[None, :]
    of_label_RP = tl.load(at_RP, mask=(d_P < D)[None, :], other=0.0).to(tl.float32)
    if WEIGHTED:
        weight_R = tl.load(weights + row_R, mask=exists_R, other=0.0)
    else:
        weight_R = tl.zeros_like(best_R) + scale
    score_R = tl.sum(hidden_RP.to(tl.float32) * of_label_RP, 1)
    log_R = best_R * LOG2E + tl.log2(total_R)
    at_R = first_row + row_R
    tl.store(log_total + at_R, log_R, mask=exists_R)
    tl.store(loss + at_R, (log_R / LOG2E - score_R) * weight_R, mask=exists_R)
    gradient_RP = (sum_RP / total_R[:, None] - of_label_RP) * weight_R[:, None]
    exists_RP = exists_R[:, None] & (d_P < D)[None, :]
    tl.store(d_hidden + at_R[:, None] * D + d_P[None, :], gradient_RP, mask=exists_RP)


@triton.jit(do_not_specialize=["N", "V", "blocks"])
def forward(
    hidden,
    head,
    labels,
    weights,
    loss_MN,
    log_total_MN,
    d_hidden_MND,
    best_MSN,
    total_MSN,
    sum_MSND,
    N,
    V,
    hidden_m,
    hidden_n,
    head_m,
    head_v,
    scale,
    blocks,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    CHECK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """R rows of one member over `blocks` blocks of the vocabulary; with SPLIT, one of S parts."""
    m, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    hidden += m * hidden_m
    head += m * head_m
    hidden_RP = _load_tile(hidden, row_R.to(tl.int64), N, hidden_n, D, P, True)
    best_R = tl.full([R], float("-inf"), tl.float32)
    total_R = tl.zeros([R], tl.float32)
    sum_RP = tl.zeros([R, P], tl.float32)
    column_C = tl.arange(0, C)
    begin = split * blocks * C
    end = tl.minimum(begin + blocks * C, V)
    whole = begin + (end - begin) // C * C
    for v in range(begin, whole, C):
        tile = head + tl.cast(v, tl.int64) * head_v
        head_CP = _load_tile(tile, column_C, C, head_v, D, P, False)
        best_R, total_R, sum_RP = _absorb(hidden_RP, head_CP, C, best_R, total_R, sum_RP, False)
    if CHECK:  # noqa: SIM102 - decided by the compiler; what follows, when it runs
        if whole < end:
            tile = head + tl.cast(whole, tl.int64) * head_v
            left = end - whole
            head_CP = _load_tile(tile, column_C, left, head_v, D, P, True)
            best_R, total_R, sum_RP = _absorb(
                hidden_RP, head_CP, left, best_R, total_R, sum_RP, True
            )
    if SPLIT:
        at_R = (m * splits + split) * N + row_R
        d_P = tl.arange(0, P)
        tl.store(best_MSN + at_R, best_R, mask=row_R < N)
        tl.store(total_MSN + at_R, total_R, mask=row_R < N)
        exists_RP = (row_R < N)[:, None] & (d_P < D)[None, :]
        tl.store(sum_MSND + at_R[:, None] * D + d_P[None, :], sum_RP, mask=exists_RP)
    else:
        _finish(
            hidden_RP, best_R, total_R, sum_RP, head, labels, weights, loss_MN, log_total_MN,
            d_hidden_MND, row_R, m * N, N, head_v, scale, D, P, WEIGHTED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "splits"])
def combine(
    hidden,
    head,
    labels,
    weights,
    loss_MN,
    log_total_MN,
    d_hidden_MND,
    best_MSN,
    total_MSN,
    sum_MSND,
    N,
    hidden_m,
    hidden_n,
    head_m,
    head_v,
    scale,
    splits,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Add up the parts of a split forward pass, in their order."""
    m = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    exists_R = row_R < N
    hidden_RP = _load_tile(hidden + m * hidden_m, row_R.to(tl.int64), N, hidden_n, D, P, True)
    best_R = tl.full([R], float("-inf"), tl.float32)
    total_R = tl.zeros([R], tl.float32)
    sum_RP = tl.zeros([R, P], tl.float32)
    for split in range(splits):
        at_R = (m * splits + split) * N + row_R
        part_best_R = tl.load(best_MSN + at_R, mask=exists_R, other=0.0)
        part_total_R = tl.load(total_MSN + at_R, mask=exists_R, other=1.0)
        part_RP = _load_tile(
            sum_MSND + (m * splits + split) * N * D, row_R.to(tl.int64), N, D, D, P, True
        )
        new_R = tl.maximum(best_R, part_best_R)
        shrink_R = tl.exp2((best_R - new_R) * LOG2E)
        part_shrink_R = tl.exp2((part_best_R - new_R) * LOG2E)
        total_R = total_R * shrink_R + part_total_R * part_shrink_R
        sum_RP = sum_RP * shrink_R[:, None] + part_RP * part_shrink_R[:, None]
        best_R = new_R
    _finish(
        hidden_RP, best_R, total_R, sum_RP, head + m * head_m, labels, weights, loss_MN,
        log_total_MN, d_hidden_MND, row_R, m * N, N, head_v, scale, D, P, WEIGHTED,
    )  # fmt: skip


@triton.jit
def _pull(
    head_CP,
    column_C,
    hidden,
    log_total,
    labels,
    weights,
    row_R,
    left,
    hidden_n,
    sum_CP,
    D: tl.constexpr,
    P: tl.constexpr,
    CHECK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Add what one block of rows, `left` of which exist, gives to the gradient of C columns."""
    hidden_RP = _load_tile(hidden, row_R, left, hidden_n, D, P, CHECK)
    if CHECK:
        log_R = tl.load(log_total + row_R, mask=row_R < left, other=float("inf"))
        label_R = tl.load(labels + row_R, mask=row_R < left, other=-1).to(tl.int32)
    else:
        log_R = tl.load(log_total + row_R)
        label_R = tl.load(labels + row_R).to(tl.int32)
    score_CR = tl.dot(head_CP, tl.trans(hidden_RP), input_precision="ieee")
    p_CR = tl.exp2(score_CR * LOG2E - log_R[None, :])
    p_CR = tl.where(column_C[:, None] == label_R[None, :], p_CR - 1.0, p_CR)
    if WEIGHTED:
        p_CR *= tl.load(weights + row_R, mask=row_R < left, other=0.0)[None, :]
    return tl.dot(p_CR.to(hidden_RP.dtype), hidden_RP, sum_CP, input_precision="ieee")


@triton.jit(do_not_specialize=["N", "V", "blocks"])
def backward(
    hidden,
    head,
    labels,
    weights,
    log_total_MN,
    d_loss_M,
    d_head_MSVD,
    N,
    V,
    hidden_m,
    hidden_n,
    head_m,
    head_v,
    scale,
    blocks,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    CHECK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Gradient of C columns of one member's head from `blocks` blocks of rows: one of S parts."""
    m, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    column_C = tl.program_id(0) * C + tl.arange(0, C)
    head_CP = _load_tile(head + m * head_m, column_C.to(tl.int64), V, head_v, D, P, True)
    hidden += m * hidden_m
    log_total = log_total_MN + m * N
    sum_CP = tl.zeros([C, P], tl.float32)
    row_R = tl.arange(0, R)
    begin = split * blocks * R
    end = tl.minimum(begin + blocks * R, N)
    whole = begin + (end - begin) // R * R
    for n in range(begin, whole, R):
        sum_CP = _pull(
            head_CP, column_C, hidden + tl.cast(n, tl.int64) * hidden_n, log_total + n, labels + n,
            weights + n, row_R, R, hidden_n, sum_CP, D, P, False, WEIGHTED,
        )  # fmt: skip
    if CHECK:  # noqa: SIM102 - decided by the compiler; what follows, when it runs
        if whole < end:
            sum_CP = _pull(
                head_CP, column_C, hidden + tl.cast(whole, tl.int64) * hidden_n,
                log_total + whole, labels + whole, weights + whole, row_R, end - whole, hidden_n,
                sum_CP, D, P, True, WEIGHTED,
            )  # fmt: skip
    factor = tl.load(d_loss_M + m)
    if not WEIGHTED:
        factor *= scale
    d_P = tl.arange(0, P)
    at_C = (m * splits + split) * V + column_C
    exists_CP = (column_C < V)[:, None] & (d_P < D)[None, :]
    tl.store(d_head_MSVD + at_C[:, None] * D + d_P[None, :], sum_CP * factor, mask=exists_CP)


@triton.jit
def _lead(score_RC, column_C, best_R, lead_R):
    """The highest score so far and its first column."""
    high_R = tl.max(score_RC, 1)
    none = 2147483647
    first_R = tl.min(tl.where(score_RC == high_R[:, None], column_C[None, :], none), 1)
    lead_R = tl.where(high_R > best_R, first_R, lead_R)
    return tl.maximum(best_R, high_R), lead_R


@triton.jit(do_not_specialize=["N", "V"])
def hits(
    hidden,
    head,
    labels,
    found_MB,
    N,
    V,
    hidden_m,
    hidden_n,
    head_m,
    head_v,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    CHECK: tl.constexpr,
):
    """How many of R rows of one member have their first highest score at the label."""
    m = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    hidden_RP = _load_tile(hidden + m * hidden_m, row_R.to(tl.int64), N, hidden_n, D, P, True)
    head += m * head_m
    column_C = tl.arange(0, C)
    best_R = tl.full([R], float("-inf"), tl.float32)
    lead_R = tl.zeros([R], tl.int32)
    whole = V // C * C
    for v in range(0, whole, C):
        head_CP = _load_tile(head + tl.cast(v, tl.int64) * head_v, column_C, C, head_v, D, P, False)
        score_RC = tl.dot(hidden_RP, tl.trans(head_CP), input_precision="ieee")
        best_R, lead_R = _lead(score_RC, v + column_C, best_R, lead_R)
    if CHECK:
        left = V - whole
        head_CP = _load_tile(
            head + tl.cast(whole, tl.int64) * head_v, column_C, left, head_v, D, P, True
        )
        score_RC = tl.dot(hidden_RP, tl.trans(head_CP), input_precision="ieee")
        score_RC = tl.where((column_C < left)[None, :], score_RC, float("-inf"))
        best_R, lead_R = _lead(score_RC, whole + column_C, best_R, lead_R)
    label_R = tl.load(labels + row_R, mask=row_R < N, other=-1)
    found = tl.sum((lead_R == label_R).to(tl.int64), 0)
    tl.store(found_MB + m * tl.num_programs(0) + tl.program_id(0), found)
