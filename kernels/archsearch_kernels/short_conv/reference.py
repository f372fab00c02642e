"""Definition of the short causal convolution: a sum over taps of shifted inputs.

Shape suffixes: B batch, T tokens, K positions asked for, C channels, J taps, P = J - 1 tokens
carried in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.precision import accumulator


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
    """See `archsearch_kernels.short_conv.short_conv`."""
    T, taps = x_BTC.shape[1], weight_CJ.shape[1]
    if tail_BPC is None:
        padded = F.pad(x_BTC, (0, 0, taps - 1, 0))
    else:
        padded = torch.cat((tail_BPC, x_BTC), dim=1)
    compute = accumulator(x_BTC.dtype)
    weight = weight_CJ.to(compute)

    def seen(j: int) -> Tensor:
        """The inputs that tap j weighs."""
        if at_BK is None:
            return padded[:, j : j + T].to(compute)
        index_BK1 = (at_BK + j)[..., None]
        return padded.gather(1, index_BK1.expand(-1, -1, padded.shape[-1])).to(compute)

    y_BTC = seen(0) * weight[:, 0]
    for j in range(1, taps):
        y_BTC = torch.addcmul(y_BTC, seen(j), weight[:, j])
    if bias_C is not None:
        y_BTC = y_BTC + bias_C.to(compute)
    if silu:
        y_BTC = F.silu(y_BTC)
    if gate_BTC is not None:
        y_BTC = y_BTC * gate_BTC.to(compute)
    if residual:
        y_BTC = y_BTC + seen(taps - 1)
    tail = padded[:, T:].clone()  # a view would keep the whole segment alive
    return y_BTC.to(x_BTC.dtype), tail
