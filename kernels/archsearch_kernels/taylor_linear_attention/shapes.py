"""Sizes of a call, and the tables of how the Triton programs are cut and compiled.

Block sizes come from tables; nothing is timed and no device is asked, so that sums have the same
order on every card and in every run.

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from archsearch_kernels.taylor_linear_attention import KEY_SIZES, WIDEST_VALUE, takes
from archsearch_kernels.taylor_linear_attention.layout import NONE, PUBLIC, Layout, layout

_PROGRAMS = 264
"""Programs that fill a card: two on each multiprocessor of an H100 or H200."""

_PART_CHUNKS = 8
"""Chunks of a part at least: fewer are not worth another pass."""


@dataclass(frozen=True)
class Blocks:
    """Tokens of a chunk and values of a block of a program, and how it is compiled."""

    tokens: int
    values: int
    warps: int
    stages: int


FORWARD = {1: Blocks(64, 64, 4, 3), 3: Blocks(64, 64, 4, 3), 9: Blocks(64, 16, 4, 2)}
"""By tiles of features, for half precision."""

BACKWARD = {1: Blocks(64, 64, 4, 2), 3: Blocks(64, 64, 4, 2), 9: Blocks(64, 16, 4, 2)}

STATES = {1: Blocks(64, 64, 4, 3), 3: Blocks(64, 64, 4, 3), 9: Blocks(64, 64, 4, 3)}

SINGLE = Blocks(16, 16, 4, 1)
"""For fp32, in every pass."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a call and what follows from them."""

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: torch.dtype
    layout: Layout

    @classmethod
    def of(cls, k_BTHK: Tensor, v_BTHV: Tensor) -> "Shape":
        """Sizes of a call.

        Raises:
            ValueError: sizes or a dtype that there are no programs for.
        """
        (B, T, H, K), V = k_BTHK.shape, v_BTHV.shape[-1]
        if not takes(K, V):
            raise ValueError(
                f"the backend 'triton' of Taylor linear attention takes keys of {KEY_SIZES[0]} to "
                f"{KEY_SIZES[1]} numbers and values of up to {WIDEST_VALUE}, not {K} and {V}"
            )
        if k_BTHK.dtype == torch.float64:
            raise ValueError("the backend 'triton' of Taylor linear attention takes no float64")
        return cls(B, T, H, K, V, k_BTHK.dtype, layout(K))

    @property
    def operand(self) -> torch.dtype:
        """What products take: fp16 has no room for a state."""
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    def blocks(self, table: dict[int, Blocks]) -> Blocks:
        """How one pass is cut."""
        if self.operand == torch.float32:
            return SINGLE
        found = table[self.layout.tiles]
        values = min(found.values, max(16, triton.next_power_of_2(self.V)))
        return Blocks(found.tokens, values, found.warps, found.stages)

    def programs(self, blocks: Blocks) -> int:
        """Programs of one part of all sequences: one for each head and block of values."""
        return self.B * self.H * -(-self.V // blocks.values)

    def parts(self, blocks: Blocks, is_free: bool = False) -> tuple[int, int]:
        """Tokens of each part of a sequence, and how many parts there are; none is empty.

        Args:
            is_free: another part costs no pass over the keys.
        """
        chunks = -(-self.T // blocks.tokens)
        most = chunks if is_free else -(-chunks // _PART_CHUNKS)
        wanted = max(1, min(most, _PROGRAMS // self.programs(blocks)))
        each = -(-chunks // wanted)
        return each * blocks.tokens, -(-chunks // each)

    @property
    def weights(self) -> dict[str, float]:
        """What queries weigh linear features and the constant with: K times 1 + t + t^2/2."""
        return {"ROOT": self.K**0.5, "CONSTANT": float(self.K)}

    def constants(self, blocks: Blocks) -> dict[str, Any]:
        """What all programs over a sequence are compiled for."""
        return {
            "K": self.K,
            "V": self.V,
            "P": self.layout.circle,
            "D": self.layout.depth,
            "N": self.layout.tiles,
            "BV": blocks.values,
            "C": blocks.tokens,
            "OPERAND": tl.float32 if self.operand == torch.float32 else tl.bfloat16,
            "STAGES": blocks.stages,
            "num_warps": blocks.warps,
        }


@dataclass(frozen=True)
class State:
    """A state, and how programs find its features: NONE, PUBLIC or PART."""

    memory: Tensor
    normaliser: Tensor
    kind: int

    @classmethod
    def given(cls, memory: Tensor | None, normaliser: Tensor | None, other: Tensor) -> "State":
        """A state of the caller, if there is one; `other` stands for it, and is not read."""
        if memory is None or normaliser is None:
            return cls(other, other, NONE)
        return cls(memory.float().contiguous(), normaliser.float().contiguous(), PUBLIC)
