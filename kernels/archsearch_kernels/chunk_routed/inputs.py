"""What both backends of chunk routing are given: one dtype, places of tokens, a past or none.

Shapes: B batch, T tokens, N chunks that the tokens touch, G groups, H memories, K and V sizes of
their keys and values, A softmax heads, I and U sizes of their keys and values, S slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """What does not change from call to call. `inside` is both, softmax or linear."""

    chunk: int
    inside: str = "both"
    decay_through: bool = True
    delta: bool = True


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys of before: those of kept chunks in the first slots, then those of the open chunk.

    `keys` (B, S, A, I), `values` (B, S, A, U); `kept` (B, G) chunks and `behind` (B) tokens.
    """

    keys: Tensor
    values: Tensor
    kept: Tensor
    behind: Tensor

    def places(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return which slots hold kept chunks and which the open one, as (B, S, G)."""
        slot_S1 = torch.arange(self.keys.shape[1], device=self.keys.device)[:, None]
        full_B1G = chunk * self.kept[:, None]
        kept_BSG = slot_S1 < full_B1G
        return kept_BSG, ~kept_BSG & (slot_S1 < full_B1G + self.behind[:, None, None])


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All floating-point tensors in the dtype of sums.

    `q`, `k` (B, T, H, K) and `v` (B, T, H, V) are those of the memories, `q_soft` and `k_soft`
    (B, T, A, I) those of the softmax heads; without `k_soft` a lone token's key and value lie in
    the cache already. `log_decay`, `beta`: (B, T, H). `to_keys`, `to_memory`: (B, N, G).
    `written`, `spared`: (B, H, V, K). `offset` (B): tokens of the open chunk that came before; None
    if nothing did. `chunk_of` (B or 1, T) counts chunks from that of the first token; `complete`
    (B or 1, N) are those whose last token is there.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_soft: Tensor
    k_soft: Tensor | None
    log_decay: Tensor
    beta: Tensor
    to_keys: Tensor
    to_memory: Tensor
    written: Tensor
    spared: Tensor
    cache: Cache | None
    offset: Tensor | None
    chunk_of: Tensor
    complete: Tensor
    rules: Rules

    @property
    def v_soft(self) -> Tensor:
        """The values of the memories, cut into those of the softmax heads: (B, T, A, U)."""
        v_BTAU: Tensor = self.v.flatten(2).unflatten(2, (self.q_soft.shape[2], -1))
        return v_BTAU
