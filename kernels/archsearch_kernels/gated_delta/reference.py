"""Definition of the gated delta rule: decay, predict, correct, read; one token after the other.

Shape suffixes: B batch, T tokens, H heads, K key size, V value size.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator


def gated_delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    state_BHVK: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.gated_delta.gated_delta`."""
    compute = accumulator(q_BTHK.dtype)
    q, k, v, decay, beta = (
        x.to(compute) for x in (q_BTHK, k_BTHK, v_BTHV, log_decay_BTH.exp(), beta_BTH)
    )
    B, T, H, K = k.shape
    memory_BHVK = v.new_zeros(B, H, v.shape[-1], K) if state_BHVK is None else state_BHVK
    outputs = []
    for t in range(T):
        key_BHK, query_BHK = k[:, t], q[:, t]
        memory_BHVK = memory_BHVK * decay[:, t, :, None, None]
        predicted_BHV = torch.einsum("bhvk,bhk->bhv", memory_BHVK, key_BHK)
        error_BHV = beta[:, t, :, None] * (v[:, t] - predicted_BHV)
        memory_BHVK = memory_BHVK + error_BHV[..., None] * key_BHK[..., None, :]
        outputs.append(torch.einsum("bhvk,bhk->bhv", memory_BHVK, query_BHK))
    y_BTHV = torch.stack(outputs, dim=1).to(q_BTHK.dtype)
    return y_BTHV, memory_BHVK if keep_state else None
