"""The short convolution by the Triton programs of this folder, on CUDA.

Each pass is a custom op with fake, autograd and vmap rules: it can be traced, compiled around and
mapped over a population, whose members have taps of their own. The ops take taps with a leading
dimension of members, M, of which each has B / M rows. Nothing is timed, nothing read back, and no
atomics are used, so a call can be captured in a CUDA graph and repeats bit by bit.

Shape suffixes: M members, B batch, T tokens, C channels, J taps, P = J - 1, S partial sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from archsearch_kernels.members import map_over_members
from archsearch_kernels.short_conv import TAPS, reference, triton_programs

_CHANNELS = 128
"""Channels of a program at most, four for each thread of its one warp."""

_PROGRAMS = 132 * 16
"""Programs, each of one warp, that fill the multiprocessors of an H100 or H200. Not read from the
device, so that sums have the same order on every card."""

_SHORTEST = 128
"""Tokens of a part at least: what its neighbours know is read again, J - 1 tokens."""


def short_conv(
    x_BTC: Tensor,
    weight_CJ: Tensor,
    bias_C: Tensor | None,
    *,
    gate_BTC: Tensor | None,
    tail_BPC: Tensor | None,
    silu: bool,
    residual: bool,
    at_BK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `archsearch_kernels.short_conv.short_conv`.

    Raises:
        ValueError: taps or a dtype that there are no programs for.
    """
    if at_BK is not None:
        return reference.short_conv(
            x_BTC,
            weight_CJ,
            bias_C,
            gate_BTC=gate_BTC,
            tail_BPC=tail_BPC,
            silu=silu,
            residual=residual,
            at_BK=at_BK,
        )
    bias_1C = None if bias_C is None else bias_C[None]
    y_BTC: Tensor = forward(x_BTC, weight_CJ[None], bias_1C, gate_BTC, tail_BPC, silu, residual)
    return y_BTC, _next_tail(x_BTC, tail_BPC, weight_CJ.shape[1] - 1)


def _next_tail(x_BTC: Tensor, tail_BPC: Tensor | None, P: int) -> Tensor:
    B, T, C = x_BTC.shape
    if T >= P:
        return x_BTC[:, T - P :].clone()
    before = x_BTC.new_zeros(B, P - T, C) if tail_BPC is None else tail_BPC[:, T:]
    return torch.cat((before, x_BTC), dim=1)


@dataclass(frozen=True)
class _Cut:
    """How a call is cut into programs."""

    M: int
    B: int
    T: int
    C: int
    J: int
    channels: int
    tokens: int
    """Tokens that a program loads at once."""

    @classmethod
    def of(cls, x_BTC: Tensor, weight_MCJ: Tensor) -> "_Cut":
        """Sizes of a call.

        Raises:
            ValueError: taps or a dtype that there are no programs for.
        """
        (B, T, C), (M, _, J) = x_BTC.shape, weight_MCJ.shape
        assert B % M == 0
        if not TAPS[0] <= J <= TAPS[1]:
            raise ValueError(
                f"the backend 'triton' of the short convolution takes {TAPS[0]} to {TAPS[1]} taps, "
                f"not {J}"
            )
        if x_BTC.dtype == torch.float64:
            raise ValueError("the backend 'triton' of the short convolution takes no float64")
        channels = min(_CHANNELS, max(32, triton.next_power_of_2(C)))
        return cls(M, B, T, C, J, channels, 8 if J <= 4 else 4)

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return -(-self.C // self.channels)

    @property
    def parts(self) -> tuple[int, int]:
        """Tokens of each part of a row, and how many parts there are; none is empty.

        A part and the P tokens after it, which its gradients need, are a whole number of loads.
        """
        loads = -(-(_SHORTEST + self.J - 1) // self.tokens)
        wanted = max(1, min(-(-self.T // _SHORTEST), _PROGRAMS // (self.B * self.blocks)))
        loads = max(loads, -(-(-(-self.T // wanted) + self.J - 1) // self.tokens))
        each = loads * self.tokens - (self.J - 1)
        return each, -(-self.T // each)

    @property
    def group(self) -> int:
        """Rows of one member that a program of the backward pass adds up."""
        programs = self.B * self.blocks * self.parts[1]
        return min(self.B // self.M, max(1, programs // _PROGRAMS))

    def constants(
        self, bias: Tensor | None, gate: Tensor | None, tail: Tensor | None
    ) -> dict[str, Any]:
        return {
            "C": self.C,
            "J": self.J,
            "BC": self.channels,
            "U": self.tokens,
            "HAS_BIAS": bias is not None,
            "HAS_GATE": gate is not None,
            "HAS_TAIL": tail is not None,
            "num_warps": 1,
        }


def _read(x: Tensor | None, other: Tensor) -> Tensor:
    """A tensor whose channels lie side by side; `other` where there is none, which is not read."""
    if x is None:
        return other
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("archsearch::short_conv_forward", mutates_args=())
def forward(
    x_BTC: Tensor,
    weight_MCJ: Tensor,
    bias_MC: Tensor | None,
    gate_BTC: Tensor | None,
    tail_BPC: Tensor | None,
    silu: bool,
    residual: bool,
) -> Tensor:
    """Outputs of the rows of all members."""
    cut, y_BTC = _Cut.of(x_BTC, weight_MCJ), x_BTC.new_empty(x_BTC.shape)
    x = _read(x_BTC, x_BTC)
    gate, tail = _read(gate_BTC, x), _read(tail_BPC, x)
    each, parts = cut.parts
    with torch.cuda.device_of(x):
        triton_programs.forward[(cut.B * parts * cut.blocks,)](
            *(x, weight_MCJ.contiguous(), weight_MCJ if bias_MC is None else bias_MC.contiguous()),
            *(gate, tail, y_BTC, cut.T, each, parts, cut.B // cut.M),
            *(stride for one in (x, gate, tail) for stride in one.stride()[:2]),
            SILU=silu,
            RESIDUAL=residual,
            **cut.constants(bias_MC, gate_BTC, tail_BPC),
        )
    return y_BTC


@forward.register_fake
def _(
    x_BTC: Tensor,
    weight_MCJ: Tensor,
    bias_MC: Tensor | None,
    gate_BTC: Tensor | None,
    tail_BPC: Tensor | None,
    silu: bool,
    residual: bool,
) -> Tensor:
    _Cut.of(x_BTC, weight_MCJ)
    return x_BTC.new_empty(x_BTC.shape)


@torch.library.custom_op("archsearch::short_conv_backward", mutates_args=())
def backward(
    x_BTC: Tensor,
    weight_MCJ: Tensor,
    bias_MC: Tensor | None,
    gate_BTC: Tensor | None,
    tail_BPC: Tensor | None,
    dy_BTC: Tensor,
    silu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, taps, bias, gate and tail; those of what is not given are empty."""
    cut = _Cut.of(x_BTC, weight_MCJ)
    x, dy = _read(x_BTC, x_BTC), _read(dy_BTC, dy_BTC)
    gate, tail = _read(gate_BTC, x), _read(tail_BPC, x)
    dx, d_gate, d_tail = (_room(one, x) for one in (x_BTC, gate_BTC, tail_BPC))
    (each, parts), group, rows = cut.parts, cut.group, cut.B // cut.M
    groups = -(-rows // group)
    sums_MSJC = x.new_empty(cut.M, groups * parts, cut.J + 1, cut.C, dtype=torch.float32)
    with torch.cuda.device_of(x):
        triton_programs.backward[(cut.M * groups * parts * cut.blocks,)](
            *(x, weight_MCJ.contiguous(), weight_MCJ if bias_MC is None else bias_MC.contiguous()),
            *(gate, tail, dy, dx, d_gate, d_tail, sums_MSJC, cut.T, each, parts, rows, group),
            *(stride for one in (x, gate, tail, dy) for stride in one.stride()[:2]),
            SILU=silu,
            RESIDUAL=residual,
            **cut.constants(bias_MC, gate_BTC, tail_BPC),
        )
    sums_MJC = sums_MSJC.sum(1)
    d_weight = weight_MCJ.new_empty(weight_MCJ.shape).copy_(sums_MJC[:, :-1].mT)
    if bias_MC is None:
        return dx, d_weight, _room(None, weight_MCJ), d_gate, d_tail
    return dx, d_weight, sums_MJC[:, -1].to(bias_MC.dtype, copy=True), d_gate, d_tail


def _room(x: Tensor | None, other: Tensor) -> Tensor:
    """Room for the gradient of a tensor, none of it where there is no tensor."""
    return other.new_empty(len(other), 0) if x is None else x.new_empty(x.shape)


@backward.register_fake
def _(
    x_BTC: Tensor,
    weight_MCJ: Tensor,
    bias_MC: Tensor | None,
    gate_BTC: Tensor | None,
    tail_BPC: Tensor | None,
    dy_BTC: Tensor,
    silu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, d_gate, d_tail = (_room(one, x_BTC) for one in (x_BTC, gate_BTC, tail_BPC))
    d_weight, d_bias = (_room(one, weight_MCJ) for one in (weight_MCJ, bias_MC))
    return dx, d_weight, d_bias, d_gate, d_tail


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.silu, ctx.residual = inputs[5:]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    found = backward(*given, dy, ctx.silu, ctx.residual)
    wanted = (None if x is None else d for x, d in zip(given, found, strict=True))
    return *wanted, None, None


forward.register_autograd(_gradients, setup_context=_save)


for _op in (forward, backward):
    map_over_members(_op)
