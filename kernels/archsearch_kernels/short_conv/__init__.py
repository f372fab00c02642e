"""Short causal convolution, each channel on its own, with what mixers do to its output.

    c_t = bias + sum_{j=0}^{J-1} weight_j x_{t-(J-1)+j}
    y_t = act(c_t) gate_t + x_t

act is SiLU or nothing; without a gate it is 1, and x_t is added where there is a `residual`. Tokens
before the first are those of the tail, or zero. Sums, SiLU and products are in fp32 and rounded
once.

The backend `triton` reads and writes each number once in a pass: a program walks along time with
the last J inputs in registers. The backward pass makes c anew, and adds up the gradients of taps
and bias in registers, then over programs in a fixed order.

Shape suffixes: B batch, T tokens, K positions asked for, C channels, J taps, P = J - 1 tokens
carried in.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes

TAPS = (2, 8)
"""Fewest and most taps of the backend `triton`."""


def short_conv(
    x_BTC: Tensor,
    weight_CJ: Tensor,
    bias_C: Tensor | None = None,
    *,
    gate_BTC: Tensor | None = None,
    tail_BPC: Tensor | None = None,
    silu: bool = False,
    residual: bool = False,
    at_BK: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return y_BTC and the next tail_BPC, the last P inputs in order of time; in the dtype of x.

    Args:
        x_BTC: inputs, any floating dtype; `triton` takes no fp64.
        weight_CJ: taps; the last one weighs the current token.
        bias_C: added to every output.
        gate_BTC: factor of every output; gate_BKC at positions asked for.
        tail_BPC: the P inputs before the first; None: zeros.
        silu: whether SiLU is applied before the gate.
        residual: whether the current input is added in the end.
        at_BK: int64 positions in [0, T) whose outputs are asked for, y_BKC; None: all. They are
            few, and every backend gathers what they see.
        backend: `reference`, or, on CUDA, `triton`.

    Raises:
        LookupError: no such backend.
        ValueError: taps or a dtype that the backend does not take.
    """
    result: tuple[Tensor, Tensor] = FAMILY.load(backend)(
        x_BTC,
        weight_CJ,
        bias_C,
        gate_BTC=gate_BTC,
        tail_BPC=tail_BPC,
        silu=silu,
        residual=residual,
        at_BK=at_BK,
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: four taps, as many channels as heads times head size, and a gate.

    With a state to continue from, SiLU and the residual are asked for too.
    """
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, C = sizes.batch, sizes.tokens, sizes.heads * sizes.head_size
    taps = 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "x_BTC": normal(B, T, C),
        "gate_BTC": normal(B, T, C),
        "weight_CJ": normal(C, taps),
        "bias_C": normal(C),
    }
    if sizes.state:
        tensors["tail_BPC"] = normal(B, taps - 1, C)
    return Call(tensors, {"silu": sizes.state, "residual": sizes.state})


FAMILY = Family(
    name="short_conv",
    op=short_conv,
    backends={
        "reference": "archsearch_kernels.short_conv.reference:short_conv",
        "triton": "archsearch_kernels.short_conv.triton:short_conv",
    },
    make_inputs=make_inputs,
    auto={("cuda", dtype): "triton" for dtype in (torch.bfloat16, torch.float16)},
    only_on={"triton": "cuda"},
)
