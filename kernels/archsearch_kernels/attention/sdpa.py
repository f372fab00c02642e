"""Causal softmax attention by `torch.nn.functional.scaled_dot_product_attention`.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, K key size, V value
size.
"""

import torch
from torch import Tensor

from archsearch_kernels.dot_product import dot_product_attention


def attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, *, at_BT: Tensor | None) -> Tensor:
    """See `archsearch_kernels.attention.attention`."""
    mask_B1TS = None
    if at_BT is not None:
        key_S = torch.arange(k_BSGK.shape[1], device=q_BTHK.device)
        mask_B1TS = (key_S <= at_BT[..., None])[:, None]
    return dot_product_attention(q_BTHK, k_BSGK, v_BSGV, mask_B1TS)
