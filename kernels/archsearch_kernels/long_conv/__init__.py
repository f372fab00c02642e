"""Causal convolution with a filter as long as the sequence, each channel on its own.

    y_t = sum_{j=0}^{J-1} filter_j x_{t-j}

The filter is given tap by tap, by how long ago a token was. Inputs before the first are those of
the tail, or zero. Hyena and H3 are built on it (arXiv:2302.10866, arXiv:2212.14052).

Shape suffixes: B batch, T tokens, C channels, J taps, P = J - 1 tokens carried in.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def long_conv(
    x_BTC: Tensor,
    filter_JC: Tensor,
    *,
    tail_BPC: Tensor | None = None,
    keep_state: bool = True,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Return y_BTC and the next tail_BPC, the last P inputs in order of time; in the dtype of x.

    Args:
        x_BTC: inputs, any floating dtype; sums are in fp32 (fp64 for fp64 inputs).
        filter_JC: tap j weighs the input j tokens ago.
        tail_BPC: the P inputs before the first, in the dtype of x; None: zeros.
        keep_state: False leaves the next tail out (None).
        backend: `reference` or `fft`.

    Raises:
        LookupError: no such backend.
    """
    y_BTC: Tensor = FAMILY.load(backend)(x_BTC, filter_JC, tail_BPC=tail_BPC)
    if not keep_state:
        return y_BTC, None
    past = filter_JC.shape[0] - 1
    if tail_BPC is None:
        tail_BPC = x_BTC.new_zeros(x_BTC.shape[0], past, x_BTC.shape[2])
    seen = torch.cat((tail_BPC, x_BTC), dim=1)
    return y_BTC, seen[:, x_BTC.shape[1] :].clone()  # a view would keep the segment alive


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: a filter longer than the sequence without a tail, and shorter with one."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, C = sizes.batch, sizes.tokens, sizes.heads * sizes.head_size
    taps = T // 2 + 2 if sizes.state else T + 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"x_BTC": normal(B, T, C), "filter_JC": normal(taps, C) * taps**-0.5}
    if sizes.state:
        tensors["tail_BPC"] = normal(B, taps - 1, C)
    return Call(tensors, {})


FAMILY = Family(
    name="long_conv",
    op=long_conv,
    backends={
        "reference": "archsearch_kernels.long_conv.reference:long_conv",
        "fft": "archsearch_kernels.long_conv.fft:long_conv",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "fft"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
