"""Launches of the Triton programs: what each is given, and the room for what it returns.

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features, G
features of a tile.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from archsearch_kernels.taylor_linear_attention import (
    backward_programs,
    forward_programs,
    step_programs,
)
from archsearch_kernels.taylor_linear_attention.layout import (
    NONE,
    PART,
    PUBLIC,
    TILE,
    Tables,
    layout,
    tables,
)
from archsearch_kernels.taylor_linear_attention.shapes import (
    BACKWARD,
    FORWARD,
    STATES,
    Blocks,
    Shape,
    State,
)

DESCRIBES = True
"""Whether the forward pass reads by the copy engine where it can: 6 % faster in a prototype."""

STEP_FEATURES = 32
"""Features of a block of a step."""

PREPARED_ROWS = 32
"""Rows of a program that prepares the backward pass."""


class Inputs(NamedTuple):
    """What the programs read of a call: q and k padded to D columns, in the dtype of products.

    Programs are right where whole blocks are copied to shared memory as they are, and not where an
    operand is converted or gathered number by number on its way: there Triton 3.6 compiled a
    backward pass for a Hopper GPU that read wild addresses (K = 12, or fp16). So what is narrower,
    of another dtype or badly aligned is copied before.

    `exists` may stand for nothing, and is not read then.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    exists: Tensor
    is_masked: bool

    @classmethod
    def of(
        cls, shape: Shape, q: Tensor, k: Tensor, v: Tensor, exists_BT: Tensor | None
    ) -> "Inputs":
        """Tensors that can be copied in whole blocks."""
        padding = shape.layout.depth - shape.K
        q, k = (F.pad(x, (0, padding)) if padding else x for x in (q, k))
        q, k, v = (aligned(x.to(shape.operand)) for x in (q, k, v))
        exists = v[:, :, 0, 0] if exists_BT is None else exists_BT.to(torch.uint8)
        return cls(q, k, v, exists, exists_BT is not None)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of q, k, v and exists."""
        three = (stride for x in self[:3] for stride in x.stride()[:3])
        return *three, *self.exists.stride()


def aligned(x_BTHX: Tensor) -> Tensor:
    """The same where rows lie side by side and each begins on 16 bytes, else a copy that does."""
    *strides, last = x_BTHX.stride()
    if last == 1 and all(s > 0 and s % 16 == 0 for s in strides) and x_BTHX.data_ptr() % 16 == 0:
        return x_BTHX
    return x_BTHX.clone(memory_format=torch.contiguous_format)


def constants_of(shape: Shape, device: torch.device) -> Tables:
    """The constants on a device."""
    return tables(shape.K, shape.operand, device)


def outputs(
    shape: Shape, given: Inputs, first: State, keep_state: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the denominators, and the last memory and normaliser, which may be empty."""
    blocks, table = shape.blocks(FORWARD), constants_of(shape, given.v.device)
    y, denominator, memory, normaliser = results(shape, given.v, keep_state)
    each, parts = shape.parts(blocks)
    last = State(memory, normaliser, PUBLIC if keep_state else NONE)
    if parts > 1:
        counts = given.exists if given.is_masked else None
        first = key_states(shape, (each, parts), given.k, given.v, counts, None, first, last)
    described = DESCRIBES and can_be_described(shape, given, blocks)
    widths = (shape.layout.depth, shape.layout.depth, blocks.values)
    read = [
        described_rows(x, blocks.tokens, width) if described else x
        for x, width in zip(given[:3], widths, strict=True)
    ]
    forward_programs.outputs[(shape.programs(blocks), parts)](
        *(*read, given.exists),
        *(table.of_query, table.of_key, table.places, table.factor[1], table.factor[0]),
        *(first.memory, first.normaliser, y, denominator, memory, normaliser),
        *(shape.T, shape.H, each, parts, *given.strides),
        F=shape.layout.features,
        EVEN=shape.T % blocks.tokens == 0,
        MASKED=given.is_masked,
        FROM=first.kind,
        KEEPS=keep_state and parts == 1,
        DESCRIBED=described,
        **shape.weights,
        **shape.constants(blocks),
    )
    return y, denominator, memory, normaliser


def can_be_described(shape: Shape, given: Inputs, blocks: Blocks) -> bool:
    """Whether q, k and v are matrices that the copy engine reads in whole blocks.

    Each has a row for each token, heads side by side in it. Blocks are full.
    """
    return (
        shape.T % blocks.tokens == 0
        and shape.V % blocks.values == 0
        and all(
            (shape.B == 1 or x.stride(0) == shape.T * x.stride(1))
            and (shape.H == 1 or x.stride(2) == x.shape[3])
            for x in given[:3]
        )
        and shape.B * shape.T < 1 << 31
    )


def described_rows(x_BTHX: Tensor, tokens: int, width: int) -> TensorDescriptor:
    """A descriptor of blocks of `tokens` rows and `width` columns of the matrix of all heads."""
    B, T, H, X = x_BTHX.shape
    return TensorDescriptor(x_BTHX, [B * T, H * X], [x_BTHX.stride(1), 1], [tokens, width])


def results(shape: Shape, v: Tensor, keep_state: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for what the forward pass returns."""
    B, T, H, V = shape.B, shape.T, shape.H, shape.V
    y, denominator = (
        v.new_empty(B, T, H, V, dtype=shape.dtype),
        v.new_empty(B, T, H, dtype=torch.float32),
    )
    if not keep_state:
        return y, denominator, denominator.new_empty(B, 0), denominator.new_empty(B, 0)
    return y, denominator, *state_room(shape, v)


def state_room(shape: Shape, like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for a memory and a normaliser as callers have them."""
    sizes = (shape.B, shape.H, shape.layout.features)
    memory = like.new_empty(*sizes, shape.V, dtype=torch.float32)
    return memory, memory.new_empty(sizes)


def key_states(
    shape: Shape,
    cut: tuple[int, int],
    k: Tensor,
    v: Tensor,
    exists: Tensor | None,
    length_B: Tensor | None,
    first: State,
    last: State,
) -> State:
    """The state before each part of a sequence; the last one is stored if its kind says so."""
    table = constants_of(shape, v.device)
    states = _sums_of_parts(shape, cut, (k, v, exists), length_B, table.of_key, False)
    _scan(shape, cut[1], states, first, last, table, backwards=False)
    return states


def query_states(
    shape: Shape, cut: tuple[int, int], q: Tensor, g: Tensor, r: Tensor, first: State, last: State
) -> State:
    """The gradient of the state after each part of a sequence; the first is stored in `last`."""
    table = constants_of(shape, q.device)
    states = _sums_of_parts(shape, cut, (q, g, r), None, table.of_query, True)
    _scan(shape, cut[1], states, first, last, table, backwards=True)
    return states


def _sums_of_parts(
    shape: Shape,
    cut: tuple[int, int],
    read: tuple[Tensor, Tensor, Tensor | None],
    length_B: Tensor | None,
    matrices: Tensor,
    of_queries: bool,
) -> State:
    (x, u, r), (each, parts) = read, cut
    blocks, rows = shape.blocks(STATES), shape.B * shape.H * parts
    normaliser = x.new_empty(rows, shape.layout.tiles * TILE, dtype=torch.float32)
    memory = normaliser.new_empty(*normaliser.shape, shape.V)
    has_r, r = r is not None, normaliser if r is None else r
    r_strides = (*r.stride(), 0)[:3]  # what exists does not depend on the head
    lengths = normaliser if length_B is None else length_B
    grid = shape.programs(blocks) * parts * shape.layout.tiles
    forward_programs.part_states[(grid,)](
        *(x, u, r, lengths, matrices, memory, normaliser, shape.T, shape.H, each, parts),
        *(*x.stride()[:3], *u.stride()[:3], *r_strides),
        LINEAR=shape.K**0.5 if of_queries else 1.0,
        CONSTANT=float(shape.K) if of_queries else 1.0,
        HAS_R=has_r,
        IS_COUNT=not of_queries,
        HAS_LENGTHS=length_B is not None,
        **shape.constants(blocks),
    )
    return State(memory, normaliser, PART)


def _scan(
    shape: Shape, parts: int, sums: State, first: State, last: State, table: Tables, backwards: bool
) -> None:
    blocks = shape.blocks(STATES)
    load, store = (0, 1) if backwards else (1, 0)  # a gradient has the inverse factors
    forward_programs.scan[(shape.programs(blocks) * shape.layout.tiles,)](
        *(sums.memory, sums.normaliser, table.places, table.factor[load], table.factor[store]),
        *(first.memory, first.normaliser, last.memory, last.normaliser, parts),
        F=shape.layout.features,
        V=shape.V,
        N=shape.layout.tiles,
        BV=blocks.values,
        FROM=first.kind,
        KEEPS=last.kind == PUBLIC,
        BACKWARDS=backwards,
        num_warps=blocks.warps,
    )


def prepared(
    dy: Tensor, y: Tensor, denominator: Tensor, operand: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of numerator and denominator of each output."""
    dy, g, r = dy.contiguous(), torch.empty_like(y, dtype=operand), torch.empty_like(denominator)
    rows, V = r.numel(), y.shape[-1]
    backward_programs.prepare[(triton.cdiv(rows, PREPARED_ROWS),)](
        *(dy, y, denominator, g, r, rows),
        V=V,
        W=max(16, triton.next_power_of_2(V)),
        R=PREPARED_ROWS,
    )
    return g, r


def query_gradients(shape: Shape, given: Inputs, g: Tensor, r: Tensor, first: State) -> Tensor:
    """dq; `first` is the state that the call began with."""
    cut = shape.parts(shape.blocks(BACKWARD))
    if cut[1] > 1:
        counts, none = given.exists if given.is_masked else None, State(g, g, NONE)
        first = key_states(shape, cut, given.k, given.v, counts, None, first, none)
    read = (given.q, g, given.k, given.v)
    return _factors(shape, cut, read, given, r, None, first, of_keys=False, causal=True)


def key_gradients(
    shape: Shape, given: Inputs, g: Tensor, r: Tensor, first: State, last: State
) -> tuple[Tensor, Tensor]:
    """dk and dv; `first` is the gradient of the last state, that of the first goes to `last`."""
    cut = shape.parts(shape.blocks(BACKWARD))
    if cut[1] > 1:
        first = query_states(shape, cut, given.q, g, r, first, last)
    read = (given.k, given.v, given.q, g)
    dk = _factors(shape, cut, read, given, r, None, first, of_keys=True, causal=True)
    return dk, _values(shape, cut, given, g, r, None, first, last, causal=True)


def prefix_gradients(
    shape: Shape, given: Inputs, length_B: Tensor | None, first: State
) -> tuple[Tensor, Tensor]:
    """dk and dv of a prefix; `first` is the gradient of the state that it leaves."""
    cut = shape.parts(shape.blocks(BACKWARD), is_free=True)
    read, unused = (given.k, given.v, given.k, given.v), first.normaliser
    dk = _factors(shape, cut, read, given, unused, length_B, first, of_keys=True, causal=False)
    none = State(unused, unused, NONE)
    return dk, _values(shape, cut, given, unused, unused, length_B, first, none, causal=False)


def _factors(
    shape: Shape,
    cut: tuple[int, int],
    read: tuple[Tensor, ...],
    given: Inputs,
    r: Tensor,
    length_B: Tensor | None,
    first: State,
    of_keys: bool,
    causal: bool,
) -> Tensor:
    blocks, table = shape.blocks(BACKWARD), constants_of(shape, given.v.device)
    matrices = (table.of_query, table.of_key)
    dx = _pieces(shape, read[0], blocks.values)
    backward_programs.factors[(shape.programs(blocks), cut[1])](
        *(*read, given.exists, given.exists if length_B is None else length_B, r),
        *(*(matrices[::-1] if of_keys else matrices), table.places, table.factor[1 - of_keys]),
        *(first.memory, first.normaliser, dx, shape.T, shape.H, *cut),
        *(stride for one in read for stride in one.stride()[:3]),
        *(*given.exists.stride(), dx.stride(0)),
        F=shape.layout.features,
        EVEN=shape.T % blocks.tokens == 0,
        MASKED=given.is_masked,
        HAS_LENGTHS=length_B is not None,
        OF_KEYS=of_keys,
        CAUSAL=causal,
        FROM=first.kind,
        **shape.weights,
        **shape.constants(blocks),
    )
    return dx[0] if len(dx) == 1 else dx.sum(0).to(shape.dtype)


def _values(
    shape: Shape,
    cut: tuple[int, int],
    given: Inputs,
    g: Tensor,
    r: Tensor,
    length_B: Tensor | None,
    first: State,
    last: State,
    causal: bool,
) -> Tensor:
    blocks, table = shape.blocks(FORWARD), constants_of(shape, given.v.device)
    dv = torch.empty_like(given.v, dtype=shape.dtype, memory_format=torch.contiguous_format)
    backward_programs.values[(shape.programs(blocks), cut[1])](
        *(given.q, given.k, g, given.exists, given.exists if length_B is None else length_B, r),
        *(table.of_query, table.of_key, table.places, *table.factor),
        *(first.memory, first.normaliser, dv, last.memory, last.normaliser, shape.T, shape.H, *cut),
        *(*given.q.stride()[:3], *given.k.stride()[:3], *given.exists.stride()),
        F=shape.layout.features,
        EVEN=shape.T % blocks.tokens == 0,
        MASKED=given.is_masked,
        HAS_LENGTHS=length_B is not None,
        CAUSAL=causal,
        FROM=first.kind,
        KEEPS=last.kind == PUBLIC and cut[1] == 1,
        **shape.weights,
        **shape.constants(blocks),
    )
    return dv


def _pieces(shape: Shape, like: Tensor, values: int) -> Tensor:
    """Room for what each block of values gives to a gradient: fp32 where there are several."""
    count = -(-shape.V // values)
    dtype = shape.dtype if count == 1 else torch.float32
    return like.new_empty(count, shape.B, shape.T, shape.H, shape.K, dtype=dtype)


def step(q: Tensor, k: Tensor, v: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
    """One token; the state changes in place."""
    (B, H, K), V = k.shape, v.shape[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    table = tables(K, torch.float32, v.device)
    y = v.new_empty(B, H, V)
    step_programs.step[(B * H,)](
        *(q, k, v, memory, normaliser, y, table.pairs, table.weight, H),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        V=V,
        F=layout(K).features,
        W=max(16, triton.next_power_of_2(V)),
        R=STEP_FEATURES,
        STAGES=2,
    )
    return y
