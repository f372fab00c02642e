"""Sliding-window attention by the Triton programs of this folder, on CUDA.

Each pass is a custom op with fake, autograd and vmap rules: it can be traced, compiled around and
mapped over a population, which is folded into the batch. Block sizes come from tables; nothing is
timed, nothing read back, and no atomics are used, so a call can be captured in a CUDA graph and
repeats bit by bit. Products of fp32 inputs are exact fp32, which no matrix unit does: correct, not
fast. A query that sees nothing is 0 and has no gradient. Queries at places of their own are masked,
as by `masked`.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, K key size, V value
size.
"""

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from archsearch_kernels.members import map_over_members
from archsearch_kernels.sliding_window import (
    WIDEST_TRITON,
    backward_programs,
    forward_programs,
    masked,
)


class Blocks(NamedTuple):
    """Queries and keys of a block, and how a program is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


class Cut(NamedTuple):
    """How each pass is cut."""

    forward: Blocks
    of_queries: Blocks
    of_keys: Blocks


LONG_WINDOW = 256
"""Windows from here on are `LONG`: most blocks have no border, and larger ones read less."""

SHORT = {
    64: Cut(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    128: Cut(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    256: Cut(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2)),
}
"""By the padded size of a head at most, for half precision."""

LONG = {
    64: Cut(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    128: Cut(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    256: SHORT[256],
}

FEW = 16
"""Up to so many queries have blocks of no more: those of a decoded token."""

_SINGLE = Blocks(32, 32, 4, 1)
"""For fp32, in every pass."""


def sliding_window(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    *,
    window: int,
    exists_BS: Tensor | None,
    at_BT: Tensor | None,
) -> Tensor:
    """See `archsearch_kernels.sliding_window.sliding_window`.

    Raises:
        ValueError: a dtype or a head size that there are no programs for.
    """
    if at_BT is not None:
        return masked.sliding_window(
            q_BTHK, k_BSGK, v_BSGV, window=window, exists_BS=exists_BS, at_BT=at_BT
        )
    _require_programs(q_BTHK, v_BSGV)
    if exists_BS is not None:
        exists_BS = exists_BS.expand(k_BSGK.shape[:2])
    y_BTHV: Tensor = forward(q_BTHK, k_BSGK, v_BSGV, exists_BS, window)[0]
    return y_BTHV


def _require_programs(q_BTHK: Tensor, v_BSGV: Tensor) -> None:
    widest = max(q_BTHK.shape[-1], v_BSGV.shape[-1])
    if widest > WIDEST_TRITON:
        raise ValueError(
            f"the backend 'triton' of sliding-window attention takes heads of up to "
            f"{WIDEST_TRITON} numbers, not {widest}; use 'masked'"
        )
    if q_BTHK.dtype == torch.float64:
        raise ValueError(
            "the backend 'triton' of sliding-window attention takes no float64; use 'masked'"
        )


class Launch:
    """What all programs of one call are given. `exists` may stand for nothing: it is not read."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, exists_BS: Tensor | None, window: int
    ) -> None:
        self.q, self.k, self.v = _dense(q), _dense(k), _dense(v)
        self.exists = k[:, :, 0, 0] if exists_BS is None else exists_BS.view(torch.uint8)
        self.is_masked, self.window = exists_BS is not None, window
        (self.B, self.T, self.H, self.K), (_, self.S, self.G, self.V) = q.shape, v.shape

    def results(self) -> tuple[Tensor, Tensor]:
        """Room for outputs, and for the logarithm of each row's sum."""
        y_BTHV = self.q.new_empty(self.B, self.T, self.H, self.V)
        return y_BTHV, self.rows()

    def rows(self) -> Tensor:
        return self.q.new_empty(self.B, self.H, self.T, dtype=torch.float32)

    def cut(self) -> Cut:
        """Blocks of each pass."""
        if self.q.dtype.itemsize == 4:
            return Cut(_SINGLE, _SINGLE, _SINGLE)
        table = LONG if min(self.window, self.S) >= LONG_WINDOW else SHORT
        found = table[next(size for size in table if max(self.K, self.V) <= size)]
        if self.T > FEW:
            return found
        return Cut(*(blocks._replace(queries=FEW, warps=4) for blocks in found))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.exists

    def sizes(self, heads: int, *others: Tensor) -> tuple[int | float, ...]:
        """Numbers and strides, those of other tensors too."""
        of_heads = (x.stride()[:3] for x in (self.q, self.k, self.v))
        return (
            *(self.T, self.S, min(self.window, self.S), heads, self.K**-0.5),
            *(stride for strides in of_heads for stride in strides),
            *self.exists.stride(),
            *(stride for x in others for stride in x.stride()[:3]),
        )

    def options(self, blocks: Blocks) -> dict[str, Any]:
        """What the programs are compiled for."""
        seen = min(self.window, self.S)
        return {
            "GROUP": self.H // self.G,
            "K": self.K,
            "V": self.V,
            "P": _padded(self.K),
            "W": _padded(self.V),
            "M": blocks.queries,
            "N": blocks.keys,
            "WHOLE": seen >= blocks.queries + blocks.keys - 1,
            "EXISTS": self.is_masked,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }


def _padded(size: int) -> int:
    padded: int = triton.next_power_of_2(max(size, 16))
    return padded


def _dense(x: Tensor) -> Tensor:
    """Programs take any strides but the last; a block of rows spans less than 2^31 numbers."""
    is_dense = x.stride(-1) == 1 and x.stride(1) * 256 < 2**31
    return x if is_dense else x.contiguous()


@torch.library.custom_op("archsearch::window_forward", mutates_args=())
def forward(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, exists_BS: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """y_BTHV, and log2 of each row's sum of exponentials: [B, H, T], fp32."""
    launch = Launch(q_BTHK, k_BSGK, v_BSGV, exists_BS, window)
    y_BTHV, log_total_BHT = launch.results()
    blocks = launch.cut().forward
    grid = (launch.B * launch.H * triton.cdiv(launch.T, blocks.queries),)
    with torch.cuda.device_of(q_BTHK):
        forward_programs.forward[grid](
            *launch.tensors,
            y_BTHV,
            log_total_BHT,
            *launch.sizes(launch.H),
            **launch.options(blocks),
        )
    return y_BTHV, log_total_BHT


@forward.register_fake
def _(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, exists_BS: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    return Launch(q_BTHK, k_BSGK, v_BSGV, exists_BS, window).results()


@torch.library.custom_op("archsearch::window_backward", mutates_args=())
def backward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    exists_BS: Tensor | None,
    y_BTHV: Tensor,
    log_total_BHT: Tensor,
    dy_BTHV: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    launch = Launch(q_BTHK, k_BSGK, v_BSGV, exists_BS, window)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_BTHK, k_BSGK, v_BSGV))
    dy, log_total, delta = _dense(dy_BTHV), log_total_BHT.contiguous(), launch.rows()
    with torch.cuda.device_of(q_BTHK):
        query_gradients(launch, dy, y_BTHV.contiguous(), log_total, delta, dq)
        key_gradients(launch, dy, log_total, delta, dk, dv)
    return dq, dk, dv


def query_gradients(
    launch: Launch, dy: Tensor, y: Tensor, log_total: Tensor, delta: Tensor, dq: Tensor
) -> None:
    """Fill dq, and delta = dy . y of each row."""
    blocks = launch.cut().of_queries
    grid = (launch.B * launch.H * triton.cdiv(launch.T, blocks.queries),)
    backward_programs.query_gradients[grid](
        *(*launch.tensors, dy, y, log_total, delta, dq),
        *launch.sizes(launch.H, dy),
        **launch.options(blocks),
    )


def key_gradients(
    launch: Launch, dy: Tensor, log_total: Tensor, delta: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Fill dk and dv."""
    blocks = launch.cut().of_keys
    grid = (launch.B * launch.G * triton.cdiv(launch.S, blocks.keys),)
    backward_programs.key_gradients[grid](
        *(*launch.tensors, dy, log_total, delta, dk, dv),
        *launch.sizes(launch.G, dy),
        **launch.options(blocks),
    )


@backward.register_fake
def _(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    exists_BS: Tensor | None,
    y_BTHV: Tensor,
    log_total_BHT: Tensor,
    dy_BTHV: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q_BTHK, k_BSGK, v_BSGV))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, y, log_total = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    return *backward(*inputs, y, log_total, dy, ctx.window), None, None


forward.register_autograd(_gradients, setup_context=_save)
for _op in (forward, backward):
    map_over_members(_op)
