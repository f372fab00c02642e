"""Definition of sliding-window attention: every score, a band mask, a softmax, a sum.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, R query heads of one
group, K key size, V value size.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator


def sliding_window(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    *,
    window: int,
    exists_BS: Tensor | None,
    at_BT: Tensor | None,
) -> Tensor:
    """See `archsearch_kernels.sliding_window.sliding_window`."""
    T, H, K = q_BTHK.shape[1:]
    S, G = k_BSGK.shape[1:3]
    compute = accumulator(q_BTHK.dtype)
    q_BTGRK = q_BTHK.to(compute).unflatten(2, (G, H // G))
    score_BGRTS = torch.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK.to(compute)) * K**-0.5
    if at_BT is None:
        at_BT = torch.arange(S - T, S, device=q_BTHK.device)[None]
    key_S, at_B11T1 = torch.arange(S, device=q_BTHK.device), at_BT[:, None, None, :, None]
    visible = (at_B11T1 - window < key_S) & (key_S <= at_B11T1)
    if exists_BS is not None:
        visible = visible & exists_BS[:, None, None, None]
    weight_BGRTS = score_BGRTS.masked_fill(~visible, -torch.inf).softmax(-1)
    y_BTGRV = torch.einsum("bgrts,bsgv->btgrv", weight_BGRTS, v_BSGV.to(compute))
    return y_BTGRV.flatten(2, 3).to(q_BTHK.dtype)
