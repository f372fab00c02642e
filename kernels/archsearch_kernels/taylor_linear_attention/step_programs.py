# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton program of one decoded token: the state is read once and written once, in place.

Features are gathered as the caller's state has them, each pair once; all numbers are fp32. One
program has a sequence and head to itself, so that nothing is read that another one writes.

Shape suffixes: H heads, K key size, V value size, F features; R features of a block, W padded V.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.taylor_linear_attention.tiles import EPSILON


@triton.jit
def _features(x, pairs, weight_R, feature_R, inside_R, F: tl.constexpr):
    """Some features of one vector."""
    a_R = tl.load(pairs + feature_R, mask=inside_R, other=-1)
    b_R = tl.load(pairs + F + feature_R, mask=inside_R, other=-1)
    x_R = tl.load(x + a_R, mask=a_R >= 0, other=1.0).to(tl.float32)
    return weight_R * x_R * tl.load(x + b_R, mask=b_R >= 0, other=1.0).to(tl.float32)


@triton.jit
def step(
    q, k, v, memory, normaliser, y, pairs, weight, H, q_b, q_h, k_b, k_h, v_b, v_h,
    V: tl.constexpr, F: tl.constexpr, W: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add phi(k) v^T and phi(k) to the state of one sequence and head, and read it with phi(q)."""
    row = tl.program_id(0)
    h, b = row % H, tl.cast(row // H, tl.int64)
    v_W = tl.arange(0, W)
    value_W = tl.load(v + b * v_b + h * v_h + v_W, mask=v_W < V, other=0.0).to(tl.float32)
    memory += tl.cast(row, tl.int64) * F * V
    normaliser += tl.cast(row, tl.int64) * F
    sum_RW = tl.zeros([R, W], tl.float32)
    total_R = tl.zeros([R], tl.float32)
    for f in tl.range(0, F, R, num_stages=STAGES):
        feature_R = f + tl.arange(0, R)
        inside_R = feature_R < F
        weight_R = tl.load(weight + feature_R, mask=inside_R, other=0.0)
        query_R = _features(q + b * q_b + h * q_h, pairs, weight_R, feature_R, inside_R, F)
        key_R = _features(k + b * k_b + h * k_h, pairs, weight_R, feature_R, inside_R, F)
        count_R = tl.load(normaliser + feature_R, mask=inside_R, other=0.0) + key_R
        tl.store(normaliser + feature_R, count_R, mask=inside_R)
        total_R += query_R * count_R
        at_RW = feature_R[:, None] * V + v_W[None, :]
        inside_RW = inside_R[:, None] & (v_W < V)[None, :]
        state_RW = tl.load(memory + at_RW, mask=inside_RW, other=0.0)
        state_RW += key_R[:, None] * value_W[None, :]
        tl.store(memory + at_RW, state_RW, mask=inside_RW)
        sum_RW += query_R[:, None] * state_RW
    y_W = tl.sum(sum_RW, 0) / (tl.sum(total_R, 0) + EPSILON)
    tl.store(y + tl.cast(row, tl.int64) * V + v_W, y_W, mask=v_W < V)
