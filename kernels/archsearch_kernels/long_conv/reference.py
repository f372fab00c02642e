"""Definition of the long causal convolution: for each token, a weighted sum of the ones before.

Shape suffixes: B batch, T tokens, C channels, J taps, P = J - 1 tokens carried in, S tokens seen.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator


def long_conv(x_BTC: Tensor, filter_JC: Tensor, *, tail_BPC: Tensor | None) -> Tensor:
    """See `archsearch_kernels.long_conv.long_conv`; returns the output only."""
    compute = accumulator(x_BTC.dtype)
    seen_BSC = x_BTC if tail_BPC is None else torch.cat((tail_BPC, x_BTC), dim=1)
    inputs, taps = seen_BSC.to(compute), filter_JC.to(compute)
    J, older = taps.shape[0], inputs.shape[1] - x_BTC.shape[1]
    outputs = []
    for t in range(older, inputs.shape[1]):
        oldest = max(0, t - J + 1)
        weights = taps[: t - oldest + 1].flip(0)  # the oldest input has the last tap
        outputs.append((inputs[:, oldest : t + 1] * weights).sum(1))
    return torch.stack(outputs, dim=1).to(x_BTC.dtype)
