"""Sliding-window attention in blocks of queries: work of T x 2 window instead of T x T.

A block of C queries sees its own C keys and the `past` keys before them, at least window - 1 where
there are as many. Queries past the end fill the last block; they see themselves, as a row that
sees nothing would have no softmax, and no gradient either. Queries at places of their own are in no
such blocks; they are masked.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, R query heads of one
group, K key size, V value size, N blocks, C queries of a block, J keys of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.precision import accumulator
from archsearch_kernels.sliding_window import masked

SMALLEST_BLOCK = 32
"""Fewer queries would make matrix products too small to be fast."""


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
    if at_BT is not None:
        return masked.sliding_window(
            q_BTHK, k_BSGK, v_BSGV, window=window, exists_BS=exists_BS, at_BT=at_BT
        )
    (B, T, H, K), S, G = q_BTHK.shape, k_BSGK.shape[1], k_BSGK.shape[2]
    block = max(window, SMALLEST_BLOCK)
    if block >= T:
        block, past = T, min(window - 1, S - T)
    else:
        past = block
    blocks = -(-T // block)
    compute = accumulator(q_BTHK.dtype)
    front, back = past - (S - T), blocks * block - T
    q_BNCGRK = _pad(q_BTHK, 0, back).to(compute).view(B, blocks, block, G, H // G, K)
    k_BNJGK = _overlap(_pad(k_BSGK, front, back).to(compute), blocks, block)
    v_BNJGV = _overlap(_pad(v_BSGV, front, back).to(compute), blocks, block)

    query_C1 = torch.arange(past, past + block, device=q_BTHK.device)[:, None]
    key_J = torch.arange(past + block, device=q_BTHK.device)
    visible = (query_C1 - window < key_J) & (key_J <= query_C1)
    if exists_BS is not None or front > 0:
        if exists_BS is None:
            exists_BS = torch.ones(1, S, dtype=torch.bool, device=q_BTHK.device)
        exists_BS = F.pad(_pad(exists_BS, front, 0), (0, back), value=True)
        exists = _overlap(exists_BS, blocks, block)
        visible = visible & exists[:, :, None, None, None]
    score = torch.einsum("bncgrk,bnjgk->bngrcj", q_BNCGRK, k_BNJGK) * K**-0.5
    weight = score.masked_fill(~visible, -torch.inf).softmax(-1)
    y_BNCGRV = torch.einsum("bngrcj,bnjgv->bncgrv", weight, v_BNJGV)
    return y_BNCGRV.reshape(B, blocks * block, H, -1)[:, :T].to(q_BTHK.dtype)


def _pad(x_BT: Tensor, front: int, back: int) -> Tensor:
    """Add zeros or (where negative) drop entries along dimension 1."""
    return F.pad(x_BT, (0, 0) * (x_BT.dim() - 2) + (front, back))


def _overlap(x_BS: Tensor, blocks: int, block: int) -> Tensor:
    """Return (B, N, J, ...): each block of keys with the keys before it."""
    if blocks == 1:
        return x_BS.unsqueeze(1)
    x_BNC = x_BS.unflatten(1, (blocks + 1, block))
    return torch.cat((x_BNC[:, :-1], x_BNC[:, 1:]), dim=2)
