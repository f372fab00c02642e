"""Short causal convolution, each channel on its own.

    y_t = bias + sum_{j=0}^{J-1} weight_j x_{t-(J-1)+j}

Tokens before the first are those of the tail, or zero.

Shape suffixes: B batch, T tokens, K positions asked for, C channels, J taps, P = J - 1 tokens
carried in.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def short_conv(
    x_BTC: Tensor,
    weight_CJ: Tensor,
    bias_C: Tensor | None = None,
    *,
    tail_BPC: Tensor | None = None,
    at_BK: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return y_BTC and the next tail_BPC, the last P inputs in order of time; in the dtype of x.

    Args:
        x_BTC: inputs, any floating dtype.
        weight_CJ: taps; the last one weighs the current token.
        bias_C: added to every output.
        tail_BPC: the P inputs before the first; None: zeros.
        at_BK: int64 positions in [0, T) whose outputs are asked for, y_BKC; None: all.
        backend: `reference`.

    Raises:
        LookupError: no such backend.
    """
    result: tuple[Tensor, Tensor] = FAMILY.load(backend)(
        x_BTC, weight_CJ, bias_C, tail_BPC=tail_BPC, at_BK=at_BK
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: four taps, as many channels as heads times head size."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, C = sizes.batch, sizes.tokens, sizes.heads * sizes.head_size
    taps = 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"x_BTC": normal(B, T, C), "weight_CJ": normal(C, taps), "bias_C": normal(C)}
    if sizes.state:
        tensors["tail_BPC"] = normal(B, taps - 1, C)
    return Call(tensors, {})


FAMILY = Family(
    name="short_conv",
    op=short_conv,
    backends={"reference": "archsearch_kernels.short_conv.reference:short_conv"},
    make_inputs=make_inputs,
    auto={},
)
