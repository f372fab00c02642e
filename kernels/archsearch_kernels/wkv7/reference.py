"""Definition of RWKV-7's time mixing: look up, decay, write, read; one token after the other.

Shape suffixes: B batch, T tokens, H heads, K key size, V value size.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator


def wkv7(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    *,
    state_BHVK: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.wkv7.wkv7`."""
    compute = accumulator(r_BTHK.dtype)
    r, k, v, decay, a, b = (
        x.to(compute) for x in (r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK.exp(), a_BTHK, b_BTHK)
    )
    B, T, H, K = k.shape
    memory_BHVK = v.new_zeros(B, H, v.shape[-1], K) if state_BHVK is None else state_BHVK
    outputs = []
    for t in range(T):
        found_BHV = torch.einsum("bhvk,bhk->bhv", memory_BHVK, a[:, t])
        memory_BHVK = (
            memory_BHVK * decay[:, t, :, None, :]
            + found_BHV[..., None] * b[:, t, :, None, :]
            + v[:, t, :, :, None] * k[:, t, :, None, :]
        )
        outputs.append(torch.einsum("bhvk,bhk->bhv", memory_BHVK, r[:, t]))
    y_BTHV = torch.stack(outputs, dim=1).to(r_BTHK.dtype)
    return y_BTHV, memory_BHVK if keep_state else None
