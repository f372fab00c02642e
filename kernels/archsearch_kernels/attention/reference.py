"""Definition of causal softmax attention: every score, a mask, a softmax, a sum.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, R query heads of one
group, K key size, V value size.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator


def attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, *, at_BT: Tensor | None) -> Tensor:
    """See `archsearch_kernels.attention.attention`."""
    T, H, K = q_BTHK.shape[1:]
    S, G = k_BSGK.shape[1:3]
    compute = accumulator(q_BTHK.dtype)
    q_BTGRK = q_BTHK.to(compute).unflatten(2, (G, H // G))
    score_BGRTS = torch.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK.to(compute)) * K**-0.5
    key_S = torch.arange(S, device=q_BTHK.device)
    if at_BT is None:
        visible = key_S <= torch.arange(T, device=q_BTHK.device)[:, None]
    else:
        visible = (key_S <= at_BT[..., None])[:, None, None]
    weight_BGRTS = score_BGRTS.masked_fill(~visible, -torch.inf).softmax(-1)
    y_BTGRV = torch.einsum("bgrts,bsgv->btgrv", weight_BGRTS, v_BSGV.to(compute))
    return y_BTGRV.flatten(2, 3).to(q_BTHK.dtype)
