# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton programs of the forward pass: the states of parts of a sequence, and the outputs.

`part_states` sums what the tokens of one part leave in one tile of features; `scan` turns these
sums into the state before each part (after it, backwards), and into the last one. `outputs` reads a
part chunk by chunk, with the state in registers: inside a chunk the square of scores, between them
features. Its order is what a Hopper GPU ran fastest: operands of the state first, the scores, the
tiles of queries, then the features of keys and the products that nothing waits for.

Shape suffixes: B batch, T tokens, H heads, K key size, V value size, S parts, N tiles, F features;
C tokens of a chunk, D padded key size, G features of a tile, V values of a block inside programs.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.taylor_linear_attention.tiles import (
    EPSILON,
    PART,
    PUBLIC,
    G,
    absorb,
    features,
    load_numbers,
    load_rows,
    load_state,
    load_state_tile,
    rounded,
    selections,
    store_rows,
    store_state,
    store_state_tile,
    turned_features,
    turned_selections,
)


@triton.jit(do_not_specialize=["T", "each", "parts"])
def part_states(
    x, u, r, lengths, table, memory, sums, T, H, each, parts, x_b, x_t, x_h, u_b, u_t, u_h, r_b,
    r_t, r_h, LINEAR: tl.constexpr, CONSTANT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    OPERAND: tl.constexpr, HAS_R: tl.constexpr, IS_COUNT: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of phi(x) u^T and phi(x) r over one part of a sequence: one tile, one block of V.

    r is what each token counts, 1 if there is none. IS_COUNT: u counts so too.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    tile, block = pid % (N * blocks) // blocks, pid % blocks
    row = pid // (N * blocks)
    part, h, b = row % parts, row // parts % H, tl.cast(row // parts // H, tl.int64)
    x += b * x_b + h * x_h
    u += b * u_b + h * u_h + block * BV
    r += b * r_b + h * r_h
    v_V = block * BV + tl.arange(0, BV)
    limit = T
    if HAS_LENGTHS:
        limit = tl.minimum(tl.load(lengths + b).to(tl.int32), T)
    at_GD = tl.arange(0, G)[:, None] + tl.arange(0, D)[None, :] * G
    first_GD = tl.load(table + at_GD)
    second_GD = tl.load(table + (2 * tile + 1) * D * G + at_GD)
    feature_G = tile * G + tl.arange(0, G)
    state_GV = tl.zeros([G, BV], tl.float32)
    sum_G = tl.zeros([G], tl.float32)
    for t0 in tl.range(part * each, tl.minimum(part * each + each, limit), C, num_stages=STAGES):
        x_CD = load_rows(x, t0, x_t, limit, D, D, C, False, OPERAND)
        u_CV = load_rows(u, t0, u_t, limit, V - block * BV, BV, C, False, OPERAND)
        r_C = load_numbers(r, t0, r_t, limit, C, HAS_R)
        if IS_COUNT and HAS_R:
            u_CV = (u_CV * r_C[:, None]).to(OPERAND)
        xT_DC = tl.trans(x_CD)
        first_GC = tl.dot(first_GD, xT_DC, input_precision="ieee")
        x_GC = turned_features(xT_DC, first_GC, second_GD, feature_G, P, LINEAR, CONSTANT, True)
        sum_G += tl.sum(x_GC * r_C[None, :], 1)
        state_GV = tl.dot(x_GC.to(OPERAND), u_CV, state_GV, input_precision="ieee")
    store_state_tile(
        memory, sums, sums, sums, row, tile, v_V, state_GV, sum_G, block == 0, N * G, V, PART
    )


@triton.jit(do_not_specialize=["parts"])
def scan(
    memory, sums, places, load_factor, store_factor, first, first_sum, last, last_sum, parts,
    F: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BV: tl.constexpr, FROM: tl.constexpr,
    KEEPS: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Replace the sums of parts by the state before each (BACKWARDS: after it); keep the last."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    tile, block = pid % (N * blocks) // blocks, pid % blocks
    row = pid // (N * blocks)
    v_V = block * BV + tl.arange(0, BV)
    state_GV = tl.zeros([G, BV], tl.float32)
    sum_G = tl.zeros([G], tl.float32)
    if FROM == PUBLIC:
        state_GV, sum_G = load_state_tile(
            first, first_sum, places, load_factor, row, tile, v_V, F, V, FROM
        )
    for i in range(0, parts):
        part = row * parts + i
        if BACKWARDS:
            part = row * parts + parts - 1 - i
        of_part_GV, of_part_G = load_state_tile(
            memory, sums, places, load_factor, part, tile, v_V, N * G, V, PART
        )
        store_state_tile(
            memory, sums, places, store_factor, part, tile, v_V, state_GV, sum_G, block == 0,
            N * G, V, PART,
        )  # fmt: skip
        state_GV += of_part_GV
        sum_G += of_part_G
    if KEEPS:
        store_state_tile(
            last, last_sum, places, store_factor, row, tile, v_V, state_GV, sum_G, block == 0, F,
            V, PUBLIC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "each", "parts"])
def outputs(
    q, k, v, exists, of_query, of_key, places, load_factor, store_factor, first, first_sum, y,
    denominator, last, last_sum, T, H, each, parts, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    e_b, e_t, ROOT: tl.constexpr, CONSTANT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    F: tl.constexpr, P: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, OPERAND: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
    FROM: tl.constexpr, KEEPS: tl.constexpr, DESCRIBED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of one part of a sequence, one head, one block of V; the last state if it KEEPS.

    DESCRIBED: q, k and v are descriptors of matrices with a row for each token, else pointers.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    part, h, b = tl.program_id(1), row % H, tl.cast(row // H, tl.int64)
    at, exists, v_V = b * T * H + h, exists + b * e_b, block * BV + tl.arange(0, BV)
    first_DG, second_DG = selections(of_query, D, N)
    first_GD, second_GD = turned_selections(of_key, D, N)
    state, sums = load_state(
        first, first_sum, places, load_factor, row, parts, part, v_V, N, F, V, FROM
    )
    order_C = tl.arange(0, C)
    end = tl.minimum(part * each + each, T)
    for t0 in tl.range(part * each, end, C, num_stages=STAGES):
        q_CD, k_CD, v_CV = _load_chunk(
            q, k, v, row, block, t0, T, H, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, K, V, D, BV,
            C, OPERAND, EVEN, DESCRIBED,
        )  # fmt: skip
        r_C = load_numbers(exists, t0, e_t, T, C, MASKED)
        sees_CC = order_C[:, None] >= order_C[None, :]
        if MASKED:
            v_CV = (v_CV * r_C[:, None]).to(OPERAND)
            sees_CC = sees_CC & (r_C[None, :] > 0)
        y_CV, total_C = _read(
            q_CD, k_CD, v_CV, sees_CC, rounded(state, OPERAND), sums, first_DG, second_DG, N, P,
            ROOT, CONSTANT,
        )  # fmt: skip
        total_C += CONSTANT * EPSILON
        y_CV = y_CV * (1.0 / total_C)[:, None]
        store_rows(y + at * V + block * BV, y_CV, t0, H * V, T, V - block * BV, BV, C)
        at_C = (t0 + order_C).to(tl.int64) * H + at
        tl.store(denominator + at_C, total_C, mask=(order_C < T - t0) & (block == 0))
        state, sums = absorb(
            state, sums, k_CD, v_CV, r_C, first_GD, second_GD, N, P, 1.0, 1.0,
            MASKED or (KEEPS and not EVEN),
        )  # fmt: skip
    if KEEPS:
        store_state(
            last, last_sum, places, store_factor, row, v_V, state, sums, block == 0, N, F, V
        )


@triton.jit
def _load_chunk(
    q, k, v, row, block, t0, T, H, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, K: tl.constexpr,
    V: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of a chunk."""
    h = row % H
    if DESCRIBED:
        at_row = row // H * T + t0
        q_CD, k_CD = q.load([at_row, h * D]), k.load([at_row, h * D])
        v_CV = v.load([at_row, h * V + block * BV])
    else:
        b = tl.cast(row // H, tl.int64)
        q, k, v = q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h + block * BV
        q_CD = load_rows(q, t0, q_t, T, D, D, C, EVEN, OPERAND)
        k_CD = load_rows(k, t0, k_t, T, D, D, C, EVEN, OPERAND)
        v_CV = load_rows(v, t0, v_t, T, V - block * BV, BV, C, EVEN and V % BV == 0, OPERAND)
    return q_CD, k_CD, v_CV


@triton.jit
def _read(q_CD, k_CD, v_CV, sees_CC, state, sums, first_DG, second_DG, N: tl.constexpr,
          P: tl.constexpr, ROOT: tl.constexpr, CONSTANT: tl.constexpr):  # fmt: skip
    """Numerator and denominator of a chunk of queries: its own keys, and the state before it."""
    score_CC = tl.dot(q_CD, tl.trans(k_CD), input_precision="ieee")
    weight_CC = tl.where(sees_CC, score_CC * (score_CC * 0.5 + ROOT) + CONSTANT, 0.0)
    total_C = tl.sum(weight_CC, 1)
    y_CV = tl.dot(weight_CC.to(v_CV.dtype), v_CV, input_precision="ieee")
    first_CG = tl.dot(q_CD, first_DG[0], input_precision="ieee")
    for n in tl.static_range(N):
        x_CG = features(q_CD, first_CG, second_DG[n], n, N, P, ROOT, CONSTANT)
        total_C += tl.sum(x_CG * sums[n][None, :], 1)
        y_CV = tl.dot(x_CG.to(v_CV.dtype), state[n], y_CV, input_precision="ieee")
    return y_CV, total_C
