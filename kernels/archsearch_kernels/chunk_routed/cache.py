"""The cache of kept chunks: where tokens lie in it, and how a segment is added.

Kept chunks fill the first slots, in order of time; the open chunk lies behind them. One that is
kept stays where it is, one that is not is overwritten by the next.

Shape suffixes: B batch, T tokens, N chunks touched, G groups, A heads, S slots, X size of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.chunk_routed.routing import of_tokens, place


def slots_of(
    tokens: int, chunk: int, kept_BG: Tensor, kept_BNG: Tensor, position_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the slot of every token, and whether it is still there after the last: (B, T, G).

    Args:
        kept_BG: chunks kept before the first token.
        kept_BNG: which of the chunks touched are kept.
        position_B: tokens before the first one.
    """
    offset_B = position_B % chunk
    chunk_BT, complete_BN = place(tokens, chunk, offset_B, position_B.device)
    counted_BNG = kept_BNG.long()
    before_BNG = kept_BG[:, None] + counted_BNG.cumsum(1) - counted_BNG
    inside_BT = (position_B[:, None] + torch.arange(tokens, device=position_B.device)) % chunk
    slot_BTG = chunk * of_tokens(before_BNG, chunk_BT) + inside_BT[..., None]
    return slot_BTG, of_tokens(kept_BNG | ~complete_BN[..., None], chunk_BT)


def write(cache_BSAX: Tensor, x_BTAX: Tensor, slot_BTG: Tensor, stays_BTG: Tensor) -> Tensor:
    """Return the cache with the tokens that stay; the given one is left as it was."""
    slots = cache_BSAX.shape[1]
    heads = x_BTAX.shape[2] // slot_BTG.shape[2]
    slot_BTG = torch.where(stays_BTG, slot_BTG, slots)  # one more slot, for what does not stay
    index = slot_BTG.repeat_interleave(heads, 2)[..., None].expand_as(x_BTAX)
    return F.pad(cache_BSAX, (0, 0, 0, 0, 0, 1)).scatter(1, index, x_BTAX)[:, :slots].clone()


def write_one(cache_BSAX: Tensor, x_B1AX: Tensor, slot_B1G: Tensor) -> None:
    """Write a lone token into the cache."""
    heads = x_B1AX.shape[2] // slot_B1G.shape[2]
    index = slot_B1G.repeat_interleave(heads, 2)[..., None].expand_as(x_B1AX)
    cache_BSAX.scatter_(1, index, x_B1AX)
