"""Which chunks go where: scores of chunks, hard routes under a cap, and their gradients.

A chunk's score is the mean of its tokens' scores; zero and above asks for keys. Nothing here
depends on a token behind the chunk that is decided.

Shape suffixes: B batch, T tokens, N chunks that the tokens touch, G groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-9
"""Added before a share of a count is rounded down: 0.3 of 10 chunks is 3."""


class Past(NamedTuple):
    """What is kept of the tokens before a segment.

    `score` (B, G): sums of the scores in the chunk that is open. `kept` (B, G): how many chunks are
    kept. `position` (B): how many tokens there were. The last two are int64.
    """

    score: Tensor
    kept: Tensor
    position: Tensor


class Routes(NamedTuple):
    """Where the chunks that a segment touches go, all (B, N, G) but the last.

    `kept`: complete chunks whose keys are kept. `asks`: 1 for those that ask to be, with the
    gradient of the chance that they do. `open_score` (B, G): sums of the one open at the end.
    """

    to_keys: Tensor
    to_memory: Tensor
    kept: Tensor
    asks: Tensor
    open_score: Tensor


def chunks_touched(tokens: int, chunk: int, *, fresh: bool) -> int:
    """How many chunks `tokens` tokens may lie in; at most that many unless the first is `fresh`."""
    return (tokens - 1 + (0 if fresh else chunk - 1)) // chunk + 1


def place(
    tokens: int, chunk: int, offset_B: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the chunk of every token (B, T) and which chunks are complete (B, N); B may be 1.

    Chunks are counted from the one of the first token; `offset_B` tokens of it came before.
    """
    start_B1 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    if offset_B is not None:
        start_B1 = offset_B[:, None]
    count = chunks_touched(tokens, chunk, fresh=offset_B is None)
    chunk_BT = (start_B1 + torch.arange(tokens, device=device)) // chunk
    end_N = chunk * torch.arange(1, count + 1, device=device)
    return chunk_BT, start_B1 + tokens >= end_N


def decide(
    score_BTG: Tensor,
    bias_G: Tensor | None,
    past: Past | None,
    *,
    chunk: int,
    share: float = 1.0,
    most: int = 0,
    gradient: str = "selected",
) -> Routes:
    """Route every chunk that a segment touches by the mean of its scores; see `admit`."""
    kept_BG = first_B = offset_B = None
    if past is not None:
        kept_BG = past.kept
        first_B, offset_B = past.position // chunk, past.position % chunk
    chunk_BT, complete_BN = place(score_BTG.shape[1], chunk, offset_B, score_BTG.device)
    sum_BNG = _chunk_sums(score_BTG, chunk_BT, complete_BN.shape[1])
    if past is not None:
        sum_BNG = torch.cat((sum_BNG[:, :1] + past.score[:, None], sum_BNG[:, 1:]), 1)
    mean_BNG = sum_BNG / chunk if bias_G is None else sum_BNG / chunk + bias_G
    chance_BNG = mean_BNG.sigmoid()
    asks = (mean_BNG >= 0) & complete_BN[..., None]
    kept_BNG = asks
    if share < 1 or most:
        kept_BNG = admit(asks, kept_BG, first_B, share, most)
    to_keys_BNG, to_memory_BNG = straight_through(kept_BNG, chance_BNG, gradient)
    asks_BNG, _ = straight_through(asks, chance_BNG, "both")
    number_N = torch.arange(complete_BN.shape[1], device=complete_BN.device)
    open_BN = number_N == complete_BN.sum(1, keepdim=True)
    open_BG = (sum_BNG * open_BN[..., None]).sum(1)
    return Routes(to_keys_BNG, to_memory_BNG, kept_BNG, asks_BNG, open_BG)


def _chunk_sums(score_BTG: Tensor, chunk_BT: Tensor, chunks: int) -> Tensor:
    """Sum the scores of each chunk's tokens: (B, N, G)."""
    number_N1 = torch.arange(chunks, device=score_BTG.device)[:, None]
    member_BNT = (chunk_BT[:, None] == number_N1).to(score_BTG.dtype)
    return member_BNT @ score_BTG


def most_kept(chunks: int, share: float, most: int) -> int:
    """How many of the first `chunks` chunks may be kept; `most` 0: no limit but the share."""
    allowed = int(share * chunks + _ROUNDING)
    return min(allowed, most) if most else allowed


def admit(
    wanted_BNG: Tensor, kept_BG: Tensor | None, first_B: Tensor | None, share: float, most: int
) -> Tensor:
    """Return which of the wanted chunks are kept under a cap, first come, first served.

    After every chunk the number kept is at most `most` (0: any), and at most `share` of the chunks
    so far: a chunk that would exceed it is refused for good.

    Args:
        wanted_BNG: complete chunks that ask for keys.
        kept_BG: kept before the first of them; None: none.
        first_B: how many chunks came before the first of them; None: none.
    """
    wants = wanted_BNG.long()
    total = wants.cumsum(1)
    kept_B1G = torch.zeros_like(wants[:, :1]) if kept_BG is None else kept_BG[:, None]
    number_BN = torch.arange(1, wants.shape[1] + 1, device=wants.device)[None]
    if first_B is not None:
        number_BN = number_BN + first_B[:, None]
    limit_BN = (share * number_BN.double() + _ROUNDING).long()
    if most:
        limit_BN = limit_BN.clamp(max=most)
    # kept_n = min(kept_{n-1} + wants_n, limit_n), where limits never fall, written without a loop.
    room = (limit_BN[..., None] - total).cummin(1).values
    kept_BNG = total + torch.minimum(room, kept_B1G)
    return kept_BNG > torch.cat((kept_B1G, kept_BNG[:, :-1]), 1)


def straight_through(hard_BNG: Tensor, chance_BNG: Tensor, gradient: str) -> tuple[Tensor, Tensor]:
    """Return the routes to keys and to the memory: hard numbers, with the gradient of the chance.

    `selected` drops the gradient of the way not taken, as published; `both` keeps it.
    """
    hard = hard_BNG.to(chance_BNG.dtype)
    change = chance_BNG - chance_BNG.detach()  # zero
    if gradient == "both":
        return hard + change, (1 - hard) - change
    return hard + hard * change, (1 - hard) - (1 - hard) * change


def of_tokens(route_BNG: Tensor, chunk_BT: Tensor) -> Tensor:
    """Return the route of each token's chunk: (B, T, G)."""
    index_BT1 = chunk_BT.expand(route_BNG.shape[0], -1)[..., None]
    return route_BNG.gather(1, index_BT1.expand(-1, -1, route_BNG.shape[2]))
