# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the backward pass: everything is made again from the inputs.

With d_i the denominator and g_i = dy_i / d_i, r_i = -(dy_i . y_i) / d_i the gradients of numerator
and denominator, which `prepare` makes,

    dw_ij = g_i . v_j + r_i                         dt_ij = dw_ij dw/dt
    d phi(q_i) = S_i g_i + z_i r_i                  the state S, z read in order
    d phi(k_j) = D_j v_j + e_j                      D = sum phi(q) g^T, e = sum phi(q) r of later
    d v_j = D_j^T phi(k_j)                          queries, read in reverse

inside a chunk through the scores, between chunks through features. So dq and dk are made by one
program, `factors`, whose tokens (x, u) are (q, g) and whose others (o, w) are (k, v), or the other
way round; and `values` is the forward pass run backwards. Each carries its own state: one program
for all of it needs more registers than there are. Of a feature x_a x_b the gradient goes to both
numbers. A program that has one of several blocks of V makes a part of dq or dk, and the first of
them counts r.

Shape suffixes: as in `forward_programs`.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.taylor_linear_attention.tiles import (
    G,
    absorb,
    features,
    is_linear,
    load_numbers,
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


@triton.jit(do_not_specialize=["T", "each", "parts"])
def factors(
    x, u, o, w, exists, lengths, r, of_x, of_o, places, load_factor, first, first_sum, dx, T, H,
    each, parts, x_b, x_t, x_h, u_b, u_t, u_h, o_b, o_t, o_h, w_b, w_t, w_h, e_b, e_t, dx_part,
    ROOT: tl.constexpr, CONSTANT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    F: tl.constexpr, P: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, OPERAND: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, OF_KEYS: tl.constexpr, CAUSAL: tl.constexpr, FROM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq of one part of a sequence, or what one block of V gives to it; OF_KEYS: dk, in reverse.

    Not CAUSAL: of a prefix, whose keys have no queries and all see the same gradient of a state.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    part, h, b = tl.program_id(1), row % H, tl.cast(row // H, tl.int64)
    x, o, at = x + b * x_b + h * x_h, o + b * o_b + h * o_h, b * T * H + h
    u, w = u + b * u_b + h * u_h + block * BV, w + b * w_b + h * w_h + block * BV
    exists, limit, v_V = exists + b * e_b, T, block * BV + tl.arange(0, BV)
    if HAS_LENGTHS:
        limit = tl.minimum(tl.load(lengths + b).to(tl.int32), T)
    first_DG, second_DG = selections(of_x, D, N)
    first_GD, second_GD = turned_selections(of_o, D, N)
    state, sums = load_state(
        first, first_sum, places, load_factor, row, parts, part, v_V, N, F, V, FROM
    )
    chunks = tl.cdiv(tl.minimum(each, T - part * each), C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        t0 = part * each + (chunks - 1 - i if OF_KEYS else i) * C
        x_CD = load_rows(x, t0, x_t, T, D, D, C, EVEN, OPERAND)
        u_CV = load_rows(u, t0, u_t, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
        r_C = load_numbers(r + at, t0, H, T, C, CAUSAL)
        of_sums_C = tl.full([C], 1.0, tl.float32) if OF_KEYS else r_C
        e_C = load_numbers(exists, t0, e_t, limit, C, MASKED)
        d_CD = _through_features(
            x_CD, u_CV, of_sums_C * (block == 0).to(tl.float32), rounded(state, OPERAND), sums,
            first_DG, second_DG, N, P, 1.0 if OF_KEYS else ROOT,
        )  # fmt: skip
        if CAUSAL:
            o_CD = load_rows(o, t0, o_t, T, D, D, C, EVEN, OPERAND)
            w_CV = load_rows(w, t0, w_t, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
            d_CD = _through_scores(
                x_CD, u_CV, o_CD, w_CV, r_C * (block == 0).to(tl.float32), e_C, d_CD, ROOT, MASKED,
                OF_KEYS,
            )  # fmt: skip
            state, sums = _next_state(
                state, sums, o_CD, w_CV, r_C, e_C, first_GD, second_GD, N, P, ROOT, CONSTANT,
                MASKED, OF_KEYS,
            )  # fmt: skip
        if OF_KEYS and (MASKED or HAS_LENGTHS):
            d_CD = tl.where(e_C[:, None] > 0, d_CD, 0.0)
        store_rows(dx + block * dx_part + at * K, d_CD, t0, H * K, T, K, D, C)


@triton.jit
def _next_state(state, sums, o_CD, w_CV, r_C, e_C, first_GD, second_GD, N: tl.constexpr,
                P: tl.constexpr, ROOT: tl.constexpr, CONSTANT: tl.constexpr,
                MASKED: tl.constexpr, OF_KEYS: tl.constexpr):  # fmt: skip
    """The state after the other tokens of a chunk: queries with g and r, or keys with values."""
    if OF_KEYS:
        state, sums = absorb(
            state, sums, o_CD, w_CV, r_C, first_GD, second_GD, N, P, ROOT, CONSTANT, True
        )
    else:
        if MASKED:
            w_CV = (w_CV * e_C[:, None]).to(w_CV.dtype)
        state, sums = absorb(
            state, sums, o_CD, w_CV, e_C, first_GD, second_GD, N, P, 1.0, 1.0, MASKED
        )
    return state, sums


@triton.jit
def _through_features(x_CD, u_CV, of_sums_C, state, sums, first_DG, second_DG, N: tl.constexpr,
                      P: tl.constexpr, LINEAR: tl.constexpr):  # fmt: skip
    """What a state gives to the tokens of a chunk that read it.

    The first factor is made again for each tile, to keep registers.
    """
    d_CD = tl.zeros([x_CD.shape[0], x_CD.shape[1]], tl.float32)
    for n in tl.static_range(N):
        d_CG = tl.dot(u_CV, tl.trans(state[n]), input_precision="ieee")
        d_CG += of_sums_C[:, None] * sums[n][None, :]
        factor_CG = tl.dot(x_CD, second_DG[n], input_precision="ieee")
        if n == N - 1:
            feature = n * G + tl.arange(0, G)[None, :]
            factor_CG = tl.where(is_linear(feature, P), LINEAR, factor_CG)
        of_first_CG = (d_CG * factor_CG).to(x_CD.dtype)
        d_CD = tl.dot(of_first_CG, tl.trans(first_DG[n]), d_CD, input_precision="ieee")
        factor_CG = tl.dot(x_CD, first_DG[n], input_precision="ieee")
        of_second_CG = (d_CG * factor_CG).to(x_CD.dtype)
        d_CD = tl.dot(of_second_CG, tl.trans(second_DG[n]), d_CD, input_precision="ieee")
    return d_CD


@triton.jit
def _through_scores(x_CD, u_CV, o_CD, w_CV, r_C, e_C, d_CD, ROOT: tl.constexpr,
                    MASKED: tl.constexpr, OF_KEYS: tl.constexpr):  # fmt: skip
    """Add what the other tokens of the same chunk give; scores have `x` as rows."""
    order_C = tl.arange(0, x_CD.shape[0])
    score_CC = tl.dot(x_CD, tl.trans(o_CD), input_precision="ieee")
    d_CC = tl.dot(u_CV, tl.trans(w_CV), input_precision="ieee")
    if OF_KEYS:
        d_CC += r_C[None, :]
        sees_CC = order_C[:, None] <= order_C[None, :]
    else:
        d_CC += r_C[:, None]
        sees_CC = order_C[:, None] >= order_C[None, :]
        if MASKED:
            sees_CC = sees_CC & (e_C[None, :] > 0)
    d_CC = tl.where(sees_CC, d_CC * (score_CC + ROOT), 0.0)
    return tl.dot(d_CC.to(o_CD.dtype), o_CD, d_CD, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "each", "parts"])
def values(
    q, k, g, exists, lengths, r, of_query, of_key, places, load_factor, store_factor, first,
    first_sum, dv, last, last_sum, T, H, each, parts, q_b, q_t, q_h, k_b, k_t, k_h, e_b, e_t,
    ROOT: tl.constexpr, CONSTANT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    F: tl.constexpr, P: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, OPERAND: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, FROM: tl.constexpr, KEEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dv of one part of a sequence, one block of V, in reverse; it KEEPS the state that is left."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    part, h, b = tl.program_id(1), row % H, tl.cast(row // H, tl.int64)
    q, k, at = q + b * q_b + h * q_h, k + b * k_b + h * k_h, b * T * H + h
    g, exists, v_V = g + at * V + block * BV, exists + b * e_b, block * BV + tl.arange(0, BV)
    limit = T
    if HAS_LENGTHS:
        limit = tl.minimum(tl.load(lengths + b).to(tl.int32), T)
    first_DG, second_DG = selections(of_key, D, N)
    first_GD, second_GD = turned_selections(of_query, D, N)
    state, sums = load_state(
        first, first_sum, places, load_factor, row, parts, part, v_V, N, F, V, FROM
    )
    chunks = tl.cdiv(tl.minimum(each, T - part * each), C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        t0 = part * each + (chunks - 1 - i) * C
        k_CD = load_rows(k, t0, k_t, T, D, D, C, EVEN, OPERAND)
        d_CV = _through_keys(k_CD, rounded(state, OPERAND), first_DG, second_DG, N, P)
        if CAUSAL:
            q_CD = load_rows(q, t0, q_t, T, D, D, C, EVEN, OPERAND)
            g_CV = load_rows(g, t0, H * V, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
            d_CV = _through_weights(k_CD, q_CD, g_CV, d_CV, ROOT, CONSTANT)
            r_C = load_numbers(r + at, t0, H, T, C, True)
            state, sums = absorb(
                state, sums, q_CD, g_CV, r_C, first_GD, second_GD, N, P, ROOT, CONSTANT, True
            )
        if MASKED or HAS_LENGTHS:
            exists_C = load_numbers(exists, t0, e_t, limit, C, MASKED) > 0
            d_CV = tl.where(exists_C[:, None], d_CV, 0.0)
        store_rows(dv + at * V + block * BV, d_CV, t0, H * V, T, V - block * BV, BV, C)
    if KEEPS:
        store_state(
            last, last_sum, places, store_factor, row, v_V, state, sums, block == 0, N, F, V
        )


@triton.jit
def _through_keys(k_CD, state, first_DG, second_DG, N: tl.constexpr, P: tl.constexpr):
    """What the queries of later chunks give to dv."""
    d_CV = tl.zeros([k_CD.shape[0], state[0].shape[1]], tl.float32)
    first_CG = tl.dot(k_CD, first_DG[0], input_precision="ieee")
    for n in tl.static_range(N):
        x_CG = features(k_CD, first_CG, second_DG[n], n, N, P, 1.0, 1.0)
        d_CV = tl.dot(x_CG.to(k_CD.dtype), state[n], d_CV, input_precision="ieee")
    return d_CV


@triton.jit
def _through_weights(k_CD, q_CD, g_CV, d_CV, ROOT: tl.constexpr, CONSTANT: tl.constexpr):
    """Add what the queries of the same chunk give to dv."""
    order_C = tl.arange(0, k_CD.shape[0])
    score_CC = tl.dot(k_CD, tl.trans(q_CD), input_precision="ieee")
    weight_CC = score_CC * (score_CC * 0.5 + ROOT) + CONSTANT
    weight_CC = tl.where(order_C[:, None] <= order_C[None, :], weight_CC, 0.0)
    return tl.dot(weight_CC.to(g_CV.dtype), g_CV, d_CV, input_precision="ieee")
