"""Definition of gated linear attention: forget, write, read; one token after the other.

Shape suffixes: B batch, T tokens, H heads, G heads of queries and keys (H or 1), K key size, V
value size, R decays of a head (K or 1).
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator


def gated_linear(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHR: Tensor,
    *,
    state_BHKV: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.gated_linear.gated_linear`."""
    compute = accumulator(q_BTGK.dtype)
    q, k, v, decay = (x.to(compute) for x in (q_BTGK, k_BTGK, v_BTHV, log_decay_BTHR.exp()))
    B, T, H, V = v.shape
    memory_BHKV = v.new_zeros(B, H, k.shape[-1], V) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        written_BHKV = k[:, t, :, :, None] * v[:, t, :, None, :]
        memory_BHKV = decay[:, t, :, :, None] * memory_BHKV + written_BHKV
        outputs.append((q[:, t, :, None, :] @ memory_BHKV).squeeze(-2))
    y_BTHV = torch.stack(outputs, dim=1).to(q_BTGK.dtype)
    return y_BTHV, memory_BHKV if keep_state else None
