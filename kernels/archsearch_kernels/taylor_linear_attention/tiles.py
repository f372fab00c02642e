# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment
# ruff: noqa: RUF005 - what compiles these programs knows no other way to make a tuple longer
"""What the Triton programs of Taylor linear attention share: tiles of tokens, features and states.

Features are made by two products with constant 0-1 matrices and one product number by number, and
so come out where the next product wants its operand: nothing is shuffled between threads. They
stand in N tiles of G = 64; what stands where says `layout`. The last tile ends with the constant
and the linear features. Of a query, features are weighted, of a key they are not; the sums are K
times what the package defines, which the quotient does not see.

A state is a tuple of N tiles with its N normalisers. Programs read and write it as the caller has
it (PUBLIC: features in `layout.places`, times a factor) or as parts of a sequence leave it (PART).

Shape suffixes: C tokens of a chunk, D padded key size, G features of a tile, V values of a block.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from archsearch_kernels.linear_attention import EPSILON as _EPSILON
from archsearch_kernels.taylor_linear_attention import layout

G = tl.constexpr(layout.TILE)
EPSILON = tl.constexpr(_EPSILON)
NONE = tl.constexpr(layout.NONE)
PUBLIC = tl.constexpr(layout.PUBLIC)
PART = tl.constexpr(layout.PART)


@triton.jit
def load_rows(
    first, t0, stride, limit, size, TILE: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """C rows from row `t0` on; rows from `limit` on, and columns from `size` on, are zeros."""
    row_C = tl.arange(0, C)
    column = tl.arange(0, TILE)
    at = first + tl.cast(t0, tl.int64) * stride + row_C[:, None] * stride + column[None, :]
    if WHOLE:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(row_C < limit - t0)[:, None] & (column < size)[None, :], other=0.0)
    return tile.to(OPERAND)


@triton.jit
def store_rows(first, tile, t0, stride, limit, size, TILE: tl.constexpr, C: tl.constexpr):
    """Store C rows from row `t0` on, up to `limit`."""
    row_C = tl.arange(0, C)
    column = tl.arange(0, TILE)
    at = first + tl.cast(t0, tl.int64) * stride + row_C[:, None] * stride + column[None, :]
    inside = (row_C < limit - t0)[:, None] & (column < size)[None, :]
    tl.store(at, tile.to(first.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(first, t0, stride, limit, C: tl.constexpr, GIVEN: tl.constexpr):
    """A number of each token in fp32, 1 if none are GIVEN, and 0 from `limit` on."""
    row_C = tl.arange(0, C)
    exists_C = row_C < limit - t0
    if GIVEN:
        at_C = first + tl.cast(t0, tl.int64) * stride + row_C * stride
        return tl.load(at_C, mask=exists_C, other=0).to(tl.float32)
    else:
        return exists_C.to(tl.float32)


@triton.jit
def selections(table, D: tl.constexpr, N: tl.constexpr):
    """The matrices of the first and of the second factor of each tile, [D, G].

    The first are all the same, but a compiler does not see it: a product that is wanted again for
    another tile is then made again, where to keep it would take registers that there are not.
    """
    at = table + tl.arange(0, D)[:, None] * G + tl.arange(0, G)[None, :]
    first = ()
    second = ()
    for n in tl.static_range(N):
        first = first + (tl.load(at + 2 * n * D * G),)
        second = second + (tl.load(at + (2 * n + 1) * D * G),)
    return first, second


@triton.jit
def turned_selections(table, D: tl.constexpr, N: tl.constexpr):
    """The same as [G, D], the first factor's once."""
    at = table + tl.arange(0, G)[:, None] + tl.arange(0, D)[None, :] * G
    second = ()
    for n in tl.static_range(N):
        second = second + (tl.load(at + (2 * n + 1) * D * G),)
    return tl.load(at), second


@triton.jit
def is_linear(feature, P: tl.constexpr):
    """Whether a feature is a number of the vector. P: the power of two at or above K."""
    return (feature >= P * P // 2 + P) & (feature < P * P // 2 + 2 * P)


@triton.jit
def is_constant(feature, P: tl.constexpr):
    """Whether a feature is the constant."""
    return feature == P * P // 2 + P // 2


@triton.jit
def features(x_CD, first_CG, second_DG, n: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
             LINEAR: tl.constexpr, CONSTANT: tl.constexpr):  # fmt: skip
    """One tile of features of C tokens, fp32. `first_CG` is the first factor of every tile."""
    x_CG = first_CG * tl.dot(x_CD, second_DG, input_precision="ieee")
    if n == N - 1:
        feature = n * G + tl.arange(0, G)[None, :]
        x_CG = tl.where(is_linear(feature, P), first_CG * LINEAR, x_CG)
        x_CG = tl.where(is_constant(feature, P), CONSTANT, x_CG)
        x_CG = tl.where(feature < P * P // 2 + 2 * P, x_CG, 0.0)  # what is 0 is not computed
    return x_CG


@triton.jit
def turned_features(xT_DC, first_GC, second_GD, feature_G, P: tl.constexpr,
                    LINEAR: tl.constexpr, CONSTANT: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """The same as [G, C]; `feature_G` are its numbers. LAST: the tile may be the last."""
    x_GC = first_GC * tl.dot(second_GD, xT_DC, input_precision="ieee")
    if LAST:
        linear_G = tl.where(is_linear(feature_G, P), LINEAR, 0.0)
        constant_G = tl.where(is_constant(feature_G, P), CONSTANT, 0.0)
        x_GC = x_GC + (first_GC * linear_G[:, None] + constant_G[:, None])
    return x_GC


@triton.jit
def absorb(state, sums, x_CD, u_CV, r_C, first_GD, second, N: tl.constexpr, P: tl.constexpr,
           LINEAR: tl.constexpr, CONSTANT: tl.constexpr, WEIGHED: tl.constexpr):  # fmt: skip
    """Add phi(x) u^T to a state and phi(x) r to its normaliser. Not WEIGHED: r is 1."""
    xT_DC = tl.trans(x_CD)
    first_GC = tl.dot(first_GD, xT_DC, input_precision="ieee")
    new_state = ()
    new_sums = ()
    for n in tl.static_range(N):
        feature_G = n * G + tl.arange(0, G)
        x_GC = turned_features(
            xT_DC, first_GC, second[n], feature_G, P, LINEAR, CONSTANT, n == N - 1
        )
        if WEIGHED:
            new_sums = new_sums + (sums[n] + tl.sum(x_GC * r_C[None, :], 1),)
        else:
            new_sums = new_sums + (sums[n] + tl.sum(x_GC, 1),)
        sum_GV = tl.dot(x_GC.to(u_CV.dtype), u_CV, state[n], input_precision="ieee")
        new_state = new_state + (sum_GV,)
    return new_state, new_sums


@triton.jit
def load_state_tile(
    memory, sums, places, factor, row, n, v_V, F: tl.constexpr, V: tl.constexpr, FROM: tl.constexpr
):
    """One tile of a state and its normaliser, of the sequence and head (and part) `row`."""
    feature_G = n * G + tl.arange(0, G)
    place_G = feature_G
    if FROM == PUBLIC:
        place_G = tl.load(places + feature_G)
    is_there_G = (place_G >= 0) & (place_G < F)
    at_G = tl.cast(row, tl.int64) * F + place_G
    inside = is_there_G[:, None] & (v_V < V)[None, :]
    state_GV = tl.load(memory + at_G[:, None] * V + v_V[None, :], mask=inside, other=0.0)
    sum_G = tl.load(sums + at_G, mask=is_there_G, other=0.0)
    if FROM == PUBLIC:
        factor_G = tl.load(factor + feature_G)
        state_GV = state_GV * factor_G[:, None]
        sum_G = sum_G * factor_G
    return state_GV, sum_G


@triton.jit
def store_state_tile(
    memory, sums, places, factor, row, n, v_V, state_GV, sum_G, keeps_sum, F: tl.constexpr,
    V: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Store what `load_state_tile` reads; the normaliser where `keeps_sum`."""
    feature_G = n * G + tl.arange(0, G)
    place_G = feature_G
    if TO == PUBLIC:
        place_G = tl.load(places + feature_G)
        factor_G = tl.load(factor + feature_G)
        state_GV = state_GV * factor_G[:, None]
        sum_G = sum_G * factor_G
    is_there_G = (place_G >= 0) & (place_G < F)
    at_G = tl.cast(row, tl.int64) * F + place_G
    inside = is_there_G[:, None] & (v_V < V)[None, :]
    tl.store(memory + at_G[:, None] * V + v_V[None, :], state_GV, mask=inside)
    tl.store(sums + at_G, sum_G, mask=is_there_G & keeps_sum)


@triton.jit
def load_state(
    memory, sums, places, factor, row, parts, part, v_V, N: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """A state to begin a part with: nothing, or one that was stored."""
    size: tl.constexpr = N * G if FROM == PART else F
    if FROM == PART:
        row = row * parts + part
    state = ()
    normaliser = ()
    for n in tl.static_range(N):
        if FROM == NONE:
            state_GV = tl.zeros([G, v_V.shape[0]], tl.float32)
            sum_G = tl.zeros([G], tl.float32)
        else:
            state_GV, sum_G = load_state_tile(
                memory, sums, places, factor, row, n, v_V, size, V, FROM
            )
        state = state + (state_GV,)
        normaliser = normaliser + (sum_G,)
    return state, normaliser


@triton.jit
def store_state(
    memory, sums, places, factor, row, v_V, state, normaliser, keeps_sum, N: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Store a state as the caller has it."""
    for n in tl.static_range(N):
        store_state_tile(
            memory, sums, places, factor, row, n, v_V, state[n], normaliser[n], keeps_sum, F, V,
            PUBLIC,
        )  # fmt: skip


@triton.jit
def rounded(state, OPERAND: tl.constexpr):
    """A state as an operand of products."""
    snapshot = ()
    for tile in tl.static_range(len(state)):
        snapshot = snapshot + (state[tile].to(OPERAND),)
    return snapshot
