"""Definition of RWKV-4's time mixing: read, then decay and write; one token after the other.

Shape suffixes: B batch, T tokens, C channels.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator
from archsearch_kernels.wkv4.sums import Sums, joined, started


def wkv4(
    k_BTC: Tensor,
    v_BTC: Tensor,
    log_decay_C: Tensor,
    bonus_C: Tensor,
    *,
    state: Sums | None,
    keep_state: bool,
) -> tuple[Tensor, Sums | None]:
    """See `archsearch_kernels.wkv4.wkv4`."""
    compute = accumulator(k_BTC.dtype)
    k, v, log_decay, bonus = (x.to(compute) for x in (k_BTC, v_BTC, log_decay_C, bonus_C))
    sums, one, outputs = started(state, k[:, 0], log_decay), torch.ones_like(k[:, 0]), []
    for t in range(k.shape[1]):
        read = joined(sums, Sums(v[:, t], one, k[:, t] + bonus), None)
        outputs.append(read.numerator / read.denominator)
        sums = joined(sums, Sums(v[:, t], one, k[:, t]), log_decay)
    return torch.stack(outputs, dim=1).to(k_BTC.dtype), sums if keep_state else None
