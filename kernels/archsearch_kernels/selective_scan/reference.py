"""Definition of the selective scan: forget, write, read; one token after the other.

Shape suffixes: B batch, T tokens, C channels, N states of a channel.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator


def selective_scan(
    x_BTC: Tensor,
    dt_BTC: Tensor,
    A_CN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_C: Tensor,
    *,
    state_BCN: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.selective_scan.selective_scan`."""
    compute = accumulator(x_BTC.dtype)
    x, dt, A, write, read, D = (
        tensor.to(compute) for tensor in (x_BTC, dt_BTC, A_CN, B_BTN, C_BTN, D_C)
    )
    batch, T, channels = x.shape
    state = x.new_zeros(batch, channels, A.shape[1]) if state_BCN is None else state_BCN
    outputs = []
    for t in range(T):
        decay_BCN = (dt[:, t, :, None] * A).exp()
        state = decay_BCN * state + (dt[:, t] * x[:, t])[..., None] * write[:, t, None]
        outputs.append(torch.einsum("bcn,bn->bc", state, read[:, t]) + D * x[:, t])
    y_BTC = torch.stack(outputs, dim=1).to(x_BTC.dtype)
    return y_BTC, state if keep_state else None
