# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the backward pass: everything is made again from the inputs.

With d_i the denominator and g_i = dy_i / d_i, r_i = -(dy_i . y_i) / d_i the gradients of numerator
and denominator, which `prepare` makes,

    dw_ij = g_i . v_j + r_i                         dt_ij = dw_ij dw/dt
    d phi(q_i) = S_i g_i + z_i r_i                  the state S, z read in order by `queries`
    d phi(k_j) = D_j v_j + e_j                      D = sum phi(q) g^T, e = sum phi(q) r of later
    d v_j = D_j^T phi(k_j)                          queries, read in reverse by `keys`

inside a chunk through the scores, between chunks through features. Of a feature x_a x_b the
gradient goes to both numbers: its product with the second factor is added up over tiles and given
to the numbers of the first factor at once. A program that has one of several blocks of V makes a
part of dq or dk, and the first of them counts r.

Shape suffixes: as in `forward_programs`.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.taylor_linear_attention.tiles import (
    G,
    absorb,
    features,
    is_linear,
    load_counts,
    load_rows,
    load_state,
    rounded,
    selections,
    store_rows,
    store_state,
    turned_selections,
)


@triton.jit(do_not_specialize=["rows"])
def prepare(dy, y, denominator, g, r, rows, V: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """g and r of R rows of V numbers."""
    row_R = tl.cast(tl.program_id(0), tl.int64) * R + tl.arange(0, R)
    v_W = tl.arange(0, W)
    at_RW = row_R[:, None] * V + v_W[None, :]
    inside_RW = (row_R < rows)[:, None] & (v_W < V)[None, :]
    dy_RW = tl.load(dy + at_RW, mask=inside_RW, other=0.0).to(tl.float32)
    y_RW = tl.load(y + at_RW, mask=inside_RW, other=0.0).to(tl.float32)
    inverse_R = 1.0 / tl.load(denominator + row_R, mask=row_R < rows, other=1.0)
    tl.store(g + at_RW, (dy_RW * inverse_R[:, None]).to(g.dtype.element_ty), mask=inside_RW)
    tl.store(r + row_R, -tl.sum(dy_RW * y_RW, 1) * inverse_R, mask=row_R < rows)


@triton.jit
def _through(x_CD, first_CG, second_DG, d_CG, sum_CG, d_CD, n: tl.constexpr, N: tl.constexpr,
             P: tl.constexpr, LINEAR: tl.constexpr):  # fmt: skip
    """Add what the gradient of one tile of features gives to both factors."""
    second_CG = tl.dot(x_CD, second_DG, input_precision="ieee")
    if n == N - 1:
        feature = n * G + tl.arange(0, G)[None, :]
        second_CG = tl.where(is_linear(feature, P), LINEAR, second_CG)
    sum_CG += d_CG * second_CG
    d_CD = tl.dot(
        (d_CG * first_CG).to(x_CD.dtype), tl.trans(second_DG), d_CD, input_precision="ieee"
    )
    return sum_CG, d_CD


@triton.jit(do_not_specialize=["T", "each", "parts"])
def queries(
    q, k, v, exists, g, r, of_query, of_key, places, load_factor, first, first_sum, dq, T, H, each,
    parts, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, e_b, e_t, dq_part, ROOT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr, FROM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of one part of a sequence, or what one block of V gives to it."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    part, h, b = tl.program_id(1), row % H, tl.cast(row // H, tl.int64)
    q, k, at = q + b * q_b + h * q_h, k + b * k_b + h * k_h, b * T * H + h
    v += b * v_b + h * v_h + block * BV
    g, exists, v_V = g + at * V + block * BV, exists + b * e_b, block * BV + tl.arange(0, BV)
    first_DG, second_DG = selections(of_query, D, N)
    first_GD, second_GD = turned_selections(of_key, D, N)
    state, sums = load_state(
        first, first_sum, places, load_factor, row, parts, part, v_V, N, F, V, FROM
    )
    order_C = tl.arange(0, C)
    counts_r = (block == 0).to(tl.float32)
    for t0 in tl.range(part * each, tl.minimum(part * each + each, T), C, num_stages=STAGES):
        q_CD = load_rows(q, t0, q_t, T, K, D, C, EVEN and K == D, OPERAND)
        k_CD = load_rows(k, t0, k_t, T, K, D, C, EVEN and K == D, OPERAND)
        v_CV = load_rows(v, t0, v_t, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
        g_CV = load_rows(g, t0, H * V, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
        r_C = counts_r * load_counts(r + at, t0, H, T, C, True)
        e_C = load_counts(exists, t0, e_t, T, C, MASKED)
        sees_CC = order_C[:, None] >= order_C[None, :]
        if MASKED:
            v_CV = (v_CV * e_C[:, None]).to(OPERAND)
            sees_CC = sees_CC & (e_C[None, :] > 0)
        score_CC = tl.dot(q_CD, tl.trans(k_CD), input_precision="ieee")
        d_CC = tl.dot(g_CV, tl.trans(v_CV), input_precision="ieee") + r_C[:, None]
        d_CC = tl.where(sees_CC, d_CC * (score_CC + ROOT), 0.0)
        d_CD = tl.dot(d_CC.to(OPERAND), k_CD, input_precision="ieee")
        d_CD = _query_features(
            q_CD, g_CV, r_C, rounded(state, OPERAND), sums, first_DG, second_DG, d_CD, N, P, ROOT
        )
        store_rows(dq + block * dq_part + at * K, d_CD, t0, H * K, T, K, D, C)
        state, sums = absorb(
            state, sums, k_CD, v_CV, e_C, first_GD, second_GD, N, P, 1.0, 1.0, MASKED
        )


@triton.jit
def _query_features(q_CD, g_CV, r_C, state, sums, first_DG, second_DG, d_CD, N: tl.constexpr,
                    P: tl.constexpr, ROOT: tl.constexpr):  # fmt: skip
    """Add what the state before a chunk gives to dq."""
    first_CG = tl.dot(q_CD, first_DG, input_precision="ieee")
    sum_CG = tl.zeros_like(first_CG)
    for n in tl.static_range(N):
        d_CG = tl.dot(g_CV, tl.trans(state[n]), input_precision="ieee")
        d_CG += r_C[:, None] * sums[n][None, :]
        sum_CG, d_CD = _through(
            q_CD, first_CG, second_DG[n], d_CG, sum_CG, d_CD, n, N, P, ROOT
        )  # fmt: skip
    return tl.dot(sum_CG.to(q_CD.dtype), tl.trans(first_DG), d_CD, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "each", "parts"])
def keys(
    q, k, v, exists, lengths, g, r, of_query, of_key, places, load_factor, store_factor, first,
    first_sum, dk, dv, last, last_sum, T, H, each, parts, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t,
    v_h, e_b, e_t, dk_part, ROOT: tl.constexpr, CONSTANT: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, F: tl.constexpr, P: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, FROM: tl.constexpr,
    KEEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk, or what one block of V gives to it, and dv of one part of a sequence, in reverse.

    Not CAUSAL: of a prefix, whose keys have no queries and all see the same gradient of a state.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    part, h, b = tl.program_id(1), row % H, tl.cast(row // H, tl.int64)
    q, k, at = q + b * q_b + h * q_h, k + b * k_b + h * k_h, b * T * H + h
    v += b * v_b + h * v_h + block * BV
    g, exists, v_V = g + at * V + block * BV, exists + b * e_b, block * BV + tl.arange(0, BV)
    limit = tl.minimum(tl.load(lengths + b).to(tl.int32), T) if HAS_LENGTHS else T
    first_DG, second_DG = selections(of_key, D, N)
    first_GD, second_GD = turned_selections(of_query, D, N)
    state, sums = load_state(
        first, first_sum, places, load_factor, row, parts, part, v_V, N, F, V, FROM
    )
    counts_r = (block == 0).to(tl.float32)
    chunks = tl.cdiv(tl.minimum(part * each + each, T) - part * each, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        t0 = part * each + (chunks - 1 - i) * C
        k_CD = load_rows(k, t0, k_t, T, K, D, C, EVEN and K == D, OPERAND)
        v_CV = load_rows(v, t0, v_t, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
        d_CD, dv_CV = _key_features(
            k_CD, v_CV, counts_r, rounded(state, OPERAND), sums, first_DG, second_DG, N, P
        )
        if CAUSAL:
            q_CD = load_rows(q, t0, q_t, T, K, D, C, EVEN and K == D, OPERAND)
            g_CV = load_rows(g, t0, H * V, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
            r_C = load_counts(r + at, t0, H, T, C, True)
            d_CD, dv_CV = _key_scores(
                q_CD, k_CD, v_CV, g_CV, counts_r * r_C, d_CD, dv_CV, ROOT, CONSTANT
            )
            state, sums = absorb(
                state, sums, q_CD, g_CV, r_C, first_GD, second_GD, N, P, ROOT, CONSTANT, True
            )
        if MASKED or HAS_LENGTHS:
            e_C1 = load_counts(exists, t0, e_t, limit, C, MASKED)[:, None]
            d_CD, dv_CV = tl.where(e_C1 > 0, d_CD, 0.0), tl.where(e_C1 > 0, dv_CV, 0.0)
        store_rows(dk + block * dk_part + at * K, d_CD, t0, H * K, T, K, D, C)
        store_rows(dv + at * V + block * BV, dv_CV, t0, H * V, T, V - block * BV, BV, C)
    if KEEPS:
        store_state(
            last, last_sum, places, store_factor, row, v_V, state, sums, block == 0, N, F, V
        )


@triton.jit
def _key_features(k_CD, v_CV, counts_r, state, sums, first_DG, second_DG, N: tl.constexpr,
                  P: tl.constexpr):  # fmt: skip
    """What the queries of later chunks give to dk and dv."""
    first_CG = tl.dot(k_CD, first_DG, input_precision="ieee")
    sum_CG = tl.zeros_like(first_CG)
    d_CD = tl.zeros([k_CD.shape[0], k_CD.shape[1]], tl.float32)
    dv_CV = tl.zeros([v_CV.shape[0], v_CV.shape[1]], tl.float32)
    for n in tl.static_range(N):
        x_CG = features(k_CD, first_CG, second_DG[n], n, N, P, 1.0, 1.0)
        dv_CV = tl.dot(x_CG.to(v_CV.dtype), state[n], dv_CV, input_precision="ieee")
        d_CG = tl.dot(v_CV, tl.trans(state[n]), input_precision="ieee")
        d_CG += counts_r * sums[n][None, :]
        sum_CG, d_CD = _through(
            k_CD, first_CG, second_DG[n], d_CG, sum_CG, d_CD, n, N, P, 1.0
        )  # fmt: skip
    d_CD = tl.dot(sum_CG.to(k_CD.dtype), tl.trans(first_DG), d_CD, input_precision="ieee")
    return d_CD, dv_CV


@triton.jit
def _key_scores(q_CD, k_CD, v_CV, g_CV, r_C, d_CD, dv_CV, ROOT: tl.constexpr,
                CONSTANT: tl.constexpr):  # fmt: skip
    """Add what the queries of the same chunk give to dk and dv; scores have keys as rows."""
    order_C = tl.arange(0, k_CD.shape[0])
    is_seen_CC = order_C[:, None] <= order_C[None, :]
    score_CC = tl.dot(k_CD, tl.trans(q_CD), input_precision="ieee")
    weight_CC = tl.where(is_seen_CC, score_CC * (score_CC * 0.5 + ROOT) + CONSTANT, 0.0)
    dv_CV = tl.dot(weight_CC.to(g_CV.dtype), g_CV, dv_CV, input_precision="ieee")
    d_CC = tl.dot(v_CV, tl.trans(g_CV), input_precision="ieee") + r_C[None, :]
    d_CC = tl.where(is_seen_CC, d_CC * (score_CC + ROOT), 0.0)
    return tl.dot(d_CC.to(q_CD.dtype), q_CD, d_CD, input_precision="ieee"), dv_CV
