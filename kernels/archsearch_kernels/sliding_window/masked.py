"""Sliding-window attention by torch's fused attention with a band mask: work of a full square.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, K key size, V value
size.
"""

import torch
from torch import Tensor

from archsearch_kernels.dot_product import dot_product_attention


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
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    if at_BT is None:
        at_BT = torch.arange(S - T, S, device=q_BTHK.device)[None]
    key_S, at_B1T1 = torch.arange(S, device=q_BTHK.device), at_BT[:, None, :, None]
    mask_B1TS = (at_B1T1 - window < key_S) & (key_S <= at_B1T1)
    if exists_BS is not None:
        mask_B1TS = mask_B1TS & exists_BS[:, None, None]
    return dot_product_attention(q_BTHK, k_BSGK, v_BSGV, mask_B1TS)
