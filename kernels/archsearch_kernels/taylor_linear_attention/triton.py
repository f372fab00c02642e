"""Taylor linear attention by the Triton programs of this folder, on CUDA.

Each pass is a custom op with fake, autograd and vmap rules: it can be traced, compiled around and
mapped over a population, which is folded into the batch. Nothing is timed, nothing read back, and
no atomics are used, so a call can be captured in a CUDA graph and repeats bit by bit. Call once
before a capture: constants are copied from the host.

Short sequences without a state go through all pairs (`short`). Where sequences and heads give too
few programs for a card, time is cut into parts: one pass sums what each part leaves, a scan makes
of it the state before each part, and the parts run at once.

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.members import folded, map_over_members
from archsearch_kernels.taylor_linear_attention import LONGEST_PAIRS, launches, short
from archsearch_kernels.taylor_linear_attention.launches import Inputs
from archsearch_kernels.taylor_linear_attention.layout import NONE, PUBLIC
from archsearch_kernels.taylor_linear_attention.shapes import STATES, Shape, State


def taylor_linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    exists_BT: Tensor | None,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    keep_state: bool,
    at_BS: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `archsearch_kernels.taylor_linear_attention.taylor_linear_attention`.

    Raises:
        ValueError: sizes or a dtype that there are no programs for.
    """
    Shape.of(k_BTHK, v_BTHV)
    V = v_BTHV.shape[-1]
    v_BTHV = _widened(v_BTHV)
    if memory_BHFV is None and not keep_state and v_BTHV.shape[1] <= LONGEST_PAIRS:
        return short.forward(q_BTHK, k_BTHK, v_BTHV, exists_BT, at_BS)[0][..., :V], None, None
    if at_BS is not None:
        raise ValueError(
            "the backend 'triton' of Taylor linear attention takes queries at places of their own "
            f"over up to {LONGEST_PAIRS} keys, with no state"
        )
    memory_BHFV = None if memory_BHFV is None else _widened(memory_BHFV)
    y_BTHV, _, memory, normaliser = forward(
        q_BTHK, k_BTHK, v_BTHV, exists_BT, memory_BHFV, normaliser_BHF, keep_state
    )
    y_BTHV = y_BTHV[..., :V]
    if not keep_state:
        return y_BTHV, None, None
    return y_BTHV, memory[..., :V].contiguous(), normaliser


def prefix_state(
    k_BTHK: Tensor, v_BTHV: Tensor, *, exists_BT: Tensor | None, length_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `archsearch_kernels.taylor_linear_attention.prefix_state`.

    Raises:
        ValueError: sizes or a dtype that there are no programs for.
    """
    Shape.of(k_BTHK, v_BTHV)
    memory_BHFV, normaliser_BHF = prefix(k_BTHK, _widened(v_BTHV), exists_BT, length_B)
    return memory_BHFV[..., : v_BTHV.shape[-1]].contiguous(), normaliser_BHF


def _widened(values: Tensor) -> Tensor:
    """Values as the programs of whole sequences take them: a multiple of 16, added ones are 0."""
    missing = -values.shape[-1] % 16
    return F.pad(values, (0, missing)) if missing else values


def step(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, memory_BHFV: Tensor, normaliser_BHF: Tensor
) -> Tensor:
    """See `archsearch_kernels.taylor_linear_attention.step`.

    Raises:
        ValueError: a state that cannot be changed in place, or sizes without programs.
    """
    Shape.of(k_BHK[:, None], v_BHV[:, None])
    for state in (memory_BHFV, normaliser_BHF):
        if state.dtype != torch.float32 or not state.is_contiguous():
            raise ValueError(
                "a step of Taylor linear attention changes a dense fp32 state, not one of "
                f"{state.dtype} with strides {state.stride()}"
            )
    y_BHV: Tensor = one_token(q_BHK, k_BHK, v_BHV, memory_BHFV, normaliser_BHF)
    return y_BHV


@torch.library.custom_op("archsearch::taylor_forward", mutates_args=())
def forward(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, denominators (K times), memory and normaliser; these empty without `keep_state`."""
    shape = Shape.of(k_BTHK, v_BTHV)
    given = Inputs.of(shape, q_BTHK, k_BTHK, v_BTHV, exists_BT)
    with torch.cuda.device_of(v_BTHV):
        first = State.given(memory_BHFV, normaliser_BHF, given.v)
        return launches.outputs(shape, given, first, keep_state)


@forward.register_fake
def _(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return launches.results(Shape.of(k_BTHK, v_BTHV), v_BTHV, keep_state)


@torch.library.custom_op("archsearch::taylor_backward", mutates_args=())
def backward(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    y_BTHV: Tensor,
    denominator_BTH: Tensor,
    dy_BTHV: Tensor,
    d_memory_BHFV: Tensor | None,
    d_normaliser_BHF: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the state that was given (empty without one)."""
    shape = Shape.of(k_BTHK, v_BTHV)
    given = Inputs.of(shape, q_BTHK, k_BTHK, v_BTHV, exists_BT)
    with torch.cuda.device_of(v_BTHV):
        g, r = launches.prepared(dy_BTHV, y_BTHV, denominator_BTH, shape.operand)
        begun = State.given(memory_BHFV, normaliser_BHF, r)
        dq = launches.query_gradients(shape, given, g, r, begun)
        d_memory, d_normaliser = _room(memory_BHFV, r), _room(normaliser_BHF, r)
        d_first = State(d_memory, d_normaliser, begun.kind)
        d_last = State.given(d_memory_BHFV, d_normaliser_BHF, r)
        dk, dv = launches.key_gradients(shape, given, g, r, d_last, d_first)
    return dq, dk, dv, d_memory, d_normaliser


@backward.register_fake
def _(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    y_BTHV: Tensor,
    denominator_BTH: Tensor,
    dy_BTHV: Tensor,
    d_memory_BHFV: Tensor | None,
    d_normaliser_BHF: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_state = (_room(x, denominator_BTH) for x in (memory_BHFV, normaliser_BHF))
    return (*(x.new_empty(x.shape) for x in (q_BTHK, k_BTHK, v_BTHV)), *d_state)  # type: ignore[return-value]


def _room(state: Tensor | None, other: Tensor) -> Tensor:
    """Room for the gradient of a state, none of it where there is no state."""
    if state is None:
        return other.new_empty(other.shape[0], 0)
    return state.new_empty(state.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.keeps_state = inputs[6]
    ctx.save_for_backward(*inputs[:6], output[0], output[1])


def _gradients(
    ctx: Any,
    dy: Tensor | None,
    _: Tensor | None,
    d_memory: Tensor | None,
    d_normaliser: Tensor | None,
) -> tuple[Tensor | None, ...]:
    *inputs, y, denominator = ctx.saved_tensors
    memory, normaliser = inputs[4:]
    dy = torch.zeros_like(y) if dy is None else dy
    if not ctx.keeps_state:
        d_memory = d_normaliser = None
    elif d_memory is not None or d_normaliser is not None:
        shape = Shape.of(inputs[1], inputs[2])
        rows = denominator.new_zeros(shape.B, shape.H, shape.layout.features)
        d_normaliser = rows if d_normaliser is None else d_normaliser
        d_memory = rows.new_zeros(*rows.shape, shape.V) if d_memory is None else d_memory
    dq, dk, dv, *d_state = backward(*inputs, y, denominator, dy, d_memory, d_normaliser)
    of_state = (
        None if x is None else d.to(x.dtype)
        for x, d in zip((memory, normaliser), d_state, strict=True)
    )
    return dq, dk, dv, None, *of_state, None


forward.register_autograd(_gradients, setup_context=_save)


@torch.library.custom_op("archsearch::taylor_prefix", mutates_args=())
def prefix(
    k_BTHK: Tensor, v_BTHV: Tensor, exists_BT: Tensor | None, length_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Memory and normaliser that all tokens leave."""
    shape = Shape.of(k_BTHK, v_BTHV)
    given = Inputs.of(shape, k_BTHK, k_BTHK, v_BTHV, exists_BT)
    with torch.cuda.device_of(v_BTHV):
        memory, normaliser = launches.state_room(shape, v_BTHV)
        first, last = State(memory, normaliser, NONE), State(memory, normaliser, PUBLIC)
        cut = shape.parts(shape.blocks(STATES))
        counts = given.exists if given.is_masked else None
        launches.key_states(shape, cut, given.k, given.v, counts, length_B, first, last)
    return memory, normaliser


@prefix.register_fake
def _(
    k_BTHK: Tensor, v_BTHV: Tensor, exists_BT: Tensor | None, length_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    return launches.state_room(Shape.of(k_BTHK, v_BTHV), v_BTHV)


@torch.library.custom_op("archsearch::taylor_prefix_backward", mutates_args=())
def prefix_backward(
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    length_B: Tensor | None,
    d_memory_BHFV: Tensor,
    d_normaliser_BHF: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v."""
    shape = Shape.of(k_BTHK, v_BTHV)
    given = Inputs.of(shape, k_BTHK, k_BTHK, v_BTHV, exists_BT)
    with torch.cuda.device_of(v_BTHV):
        d_state = State.given(d_memory_BHFV, d_normaliser_BHF, d_normaliser_BHF)
        return launches.prefix_gradients(shape, given, length_B, d_state)


@prefix_backward.register_fake
def _(
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    length_B: Tensor | None,
    d_memory_BHFV: Tensor,
    d_normaliser_BHF: Tensor,
) -> tuple[Tensor, Tensor]:
    return k_BTHK.new_empty(k_BTHK.shape), v_BTHV.new_empty(v_BTHV.shape)


def _save_prefix(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _prefix_gradients(
    ctx: Any, d_memory: Tensor, d_normaliser: Tensor
) -> tuple[Tensor | None, ...]:
    dk, dv = prefix_backward(*ctx.saved_tensors, d_memory, d_normaliser)
    return dk, dv, None, None


prefix.register_autograd(_prefix_gradients, setup_context=_save_prefix)


@torch.library.custom_op("archsearch::taylor_step", mutates_args=("memory_BHFV", "normaliser_BHF"))
def one_token(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, memory_BHFV: Tensor, normaliser_BHF: Tensor
) -> Tensor:
    """Output of one token."""
    with torch.cuda.device_of(v_BHV):
        return launches.step(q_BHK, k_BHK, v_BHV, memory_BHFV, normaliser_BHF)


@one_token.register_fake
def _(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, memory_BHFV: Tensor, normaliser_BHF: Tensor
) -> Tensor:
    return v_BHV.new_empty(v_BHV.shape)


for _op in (forward, backward, prefix, prefix_backward, short.backward, short.forward):
    map_over_members(_op)


@one_token.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
    mapped = folded(info.batch_size, in_dims, inputs)
    y = one_token(*mapped)
    for state, dim, changed in zip(inputs[3:], in_dims[3:], mapped[3:], strict=True):
        assert dim is not None, "a state that is not mapped cannot follow mapped inputs"
        if changed.data_ptr() != state.data_ptr():
            state.movedim(dim, 0).copy_(changed.unflatten(0, (info.batch_size, -1)))
    return y.unflatten(0, (info.batch_size, -1)), 0
