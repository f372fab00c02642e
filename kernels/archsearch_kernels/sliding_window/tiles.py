# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Tiles of the Triton programs of sliding-window attention, and which blocks meet a window.

Positions count keys: query t stands at S - T + t. A tile is P (of values, W) wide, the power of two
at or above the head's size; what lies outside of it is read as zeros. Offsets that grow with batch
or tokens are 64-bit.

Shape suffixes: R rows of a tile, M queries and N keys of a block, P padded size of a head.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Less than any score, and a number: a row that has seen nothing yet has no NaN."""
NOWHERE = tl.constexpr(2**30)
"""Position of a key that no query sees."""


@triton.jit
def load_tile(
    first, row_R, low, high, stride, D: tl.constexpr, P: tl.constexpr, CHECK: tl.constexpr
):
    """Rows of a matrix whose row 0 begins at `first`; with CHECK those in [low, high) alone."""
    d_P = tl.arange(0, P)
    at_RP = first + row_R[:, None] * stride + d_P[None, :]
    if CHECK:
        inside_R = (row_R >= low) & (row_R < high)
        tile_RP = tl.load(at_RP, mask=inside_R[:, None] & (d_P < D)[None, :], other=0.0)
    elif D != P:
        tile_RP = tl.load(at_RP, mask=(d_P < D)[None, :], other=0.0)
    else:
        tile_RP = tl.load(at_RP)
    return tile_RP


@triton.jit
def load_pair(
    x, y, start, row_R, low, high, x_r, y_r, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    W: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Rows from `start` on of two matrices: keys and values, or queries and their gradients."""
    start = tl.cast(start, tl.int64)
    x_RP = load_tile(x + start * x_r, row_R, low, high, x_r, K, P, CHECK)
    y_RW = load_tile(y + start * y_r, row_R, low, high, y_r, V, W, CHECK)
    return x_RP, y_RW


@triton.jit
def load_rows(log_total, delta, start, row_M, high, CHECK: tl.constexpr):
    """Two numbers of each query from `start` on; what is no query weighs nothing."""
    at_M = tl.cast(start, tl.int64) + row_M
    if CHECK:
        log_M = tl.load(log_total + at_M, mask=row_M < high, other=float("inf"))
        delta_M = tl.load(delta + at_M, mask=row_M < high, other=0.0)
    else:
        log_M, delta_M = tl.load(log_total + at_M), tl.load(delta + at_M)
    return log_M, delta_M


@triton.jit
def store_tile(first, row_R, high, stride, tile_RP, D: tl.constexpr, P: tl.constexpr):
    """Store rows below `high`."""
    d_P = tl.arange(0, P)
    at_RP = first + row_R[:, None] * stride + d_P[None, :]
    tl.store(at_RP, tile_RP, mask=(row_R < high)[:, None] & (d_P < D)[None, :])


@triton.jit
def place(count, heads, B: tl.constexpr):
    """Block, sequence and head of this program: heads lie side by side in memory, so they go first.

    `count` rows make blocks of B.
    """
    blocks = tl.cdiv(count, B)
    program = tl.program_id(0)
    rest = program // heads
    return rest % blocks, (rest // blocks).to(tl.int64), program % heads


@triton.jit
def key_blocks(first, end, window, N: tl.constexpr, WHOLE: tl.constexpr):
    """The blocks of keys that queries at [first, end) meet.

    Returns where they begin (perhaps below 0), how many have a border on the left and in all, and
    how many have none.
    """
    low = tl.maximum(first - window + 1, 0)
    count = tl.cdiv(end - low, N)
    begin = end - count * N
    left, whole = count, 0
    if WHOLE:
        right = tl.minimum(tl.cdiv(end - 1 - first, N), count)
        left = tl.cdiv(tl.maximum(end - window, 0) - begin, N)
        left = tl.minimum(left, count - right)
        whole = count - right - left
    return begin, left, count - whole, whole


@triton.jit
def query_blocks(first, end, oldest, S, window, M: tl.constexpr, WHOLE: tl.constexpr):
    """The blocks of queries, from position `oldest` on, that see any of the keys at [first, end).

    Returns where they begin, how many have a border on the left and in all, how many have none.
    """
    begin = tl.maximum(first, oldest)
    count = tl.cdiv(tl.maximum(tl.minimum(end - 1 + window, S) - begin, 0), M)
    left, whole = count, 0
    if WHOLE:
        left = tl.minimum(tl.cdiv(tl.maximum(end - 1 - begin, 0), M), count)
        until = tl.maximum(tl.minimum(first + window, S) - begin, 0) // M
        whole = tl.maximum(until - left, 0)
    return begin, left, count - whole, whole


@triton.jit
def keys_at(exists, key_N, S, stride, EXISTS: tl.constexpr):
    """Positions of a block's keys; NOWHERE for those outside of the sequence or of no use."""
    is_used_N = (key_N >= 0) & (key_N < S)
    if EXISTS:
        is_used_N = tl.load(exists + key_N.to(tl.int64) * stride, mask=is_used_N, other=0) != 0
    return tl.where(is_used_N, key_N, NOWHERE)


@triton.jit
def is_seen(query, key, window):
    """Whether 0 <= query - key < window: one comparison, as a negative number is a large one."""
    return (query - key).to(tl.uint32) < window.to(tl.uint32)
