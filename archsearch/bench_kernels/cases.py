"""What is timed: shapes, their inputs, and the fewest bytes and FLOPs that each can take.

A floor counts each input read once and each output written once, in the dtype, and the products of
the best known algorithm: of linear attention in chunks of 64, of windows the visible keys alone.

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, C channels, J taps.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

CHUNK = 64

Work = Literal["forward", "training", "prefix", "step"]
Mixing = Literal["taylor", "elu", "window", "conv_silu", "conv_gate"]
"""`conv_silu` is a short convolution with SiLU, `conv_gate` one with a gate and the residual."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of work. `training` is forward and backward; a `prefix` has T / 2 keys of its own."""

    mixing: Mixing
    work: Work
    batch: int
    tokens: int
    heads: int = 16
    key_size: int = 16
    value_size: int = 64
    window: int = 0
    taps: int = 0
    """Of a short convolution, whose channels are heads times value size."""

    @property
    def name(self) -> str:
        if self.taps:
            sizes = f"{self.batch} x {self.tokens} x {self.channels}"
            return f"{self.mixing} {self.taps} {self.work} {sizes}"
        kind = f"{self.mixing} {self.window}" if self.window else self.mixing
        sizes = f"{self.batch} x {self.tokens} x {self.heads} x ({self.key_size}, "
        return f"{kind} {self.work} {sizes}{self.value_size})"

    @property
    def channels(self) -> int:
        return self.heads * self.value_size

    @property
    def leaves(self) -> tuple[str, ...]:
        """Inputs whose gradients training asks for."""
        if not self.taps:
            return ("q", "k", "v")
        return ("x", "weight", "bias") + ("gate",) * (self.mixing == "conv_gate")

    @property
    def features(self) -> int:
        size = self.key_size
        return 1 + size + size * (size + 1) // 2 if self.mixing == "taylor" else size

    def as_softmax(self) -> "Case":
        """The same work for attention, whose heads have keys as wide as their values."""
        return replace(self, key_size=self.value_size)

    def tiny(self) -> "Case":
        """Small enough for any processor."""
        tokens, window = min(80, self.tokens), min(16, self.window)
        return replace(self, batch=2, tokens=tokens, heads=2, window=window)

    def bytes(self, itemsize: int) -> float:
        """Bytes read and written at least."""
        rows, K, V = self.batch * self.tokens * self.heads, self.key_size, self.value_size
        if self.taps:  # x and y, dy and dx, x again; a gate twice and its gradient
            gate, is_training = self.mixing == "conv_gate", self.work == "training"
            return rows * V * (2 + gate + is_training * (3 + 2 * gate)) * itemsize
        if self.work == "step":  # a state in fp32 is read and written
            return rows * (8 * self.features * (V + 1) + (2 * K + 2 * V) * itemsize)
        forward = 2 * K + 2 * V + (0.5 * (K + V) if self.work == "prefix" else 0)
        backward = 4 * K + 3 * V if self.work == "training" else 0
        return rows * (forward + backward) * itemsize

    def flops(self) -> float:
        """FLOPs at least; a multiply-add is 2."""
        rows, K, V = self.batch * self.tokens * self.heads, self.key_size, self.value_size
        F = self.features
        if self.taps:
            return rows * V * 2 * self.taps * (4 if self.work == "training" else 1)
        if self.mixing == "window":
            seen = min(self.window, self.tokens)
            return rows * 2 * seen * (K + V) * (3.5 if self.work == "training" else 1)
        if self.work == "step":
            return rows * 4 * F * (V + 1)
        inside, between = 2 * CHUNK * (K + V), 4 * F * (V + 1)
        if self.work == "prefix":
            return rows * (inside + 1.5 * between)
        backward = 2 * CHUNK * (3 * K + 2 * V) + 2.5 * between
        return rows * (inside + between + (backward if self.work == "training" else 0))


def cases() -> tuple[Case, ...]:
    """The shapes at which this package's kernels are compared."""
    prefill = [
        Case(mixing="taylor", work="forward", batch=16, tokens=tokens)
        for tokens in (2_048, 8_192, 16_384, 32_768)
    ]
    wide = {"key_size": 64, "value_size": 64}
    return (
        *prefill,
        Case(mixing="taylor", work="prefix", batch=16, tokens=32_768),
        Case(mixing="taylor", work="forward", batch=1, tokens=131_072),
        Case(mixing="taylor", work="training", batch=8, tokens=4_096),
        Case(mixing="taylor", work="training", batch=4_096, tokens=256, heads=1, value_size=128),
        Case(mixing="taylor", work="step", batch=128, tokens=1),
        Case(mixing="elu", work="forward", batch=16, tokens=32_768, **wide),
        Case(mixing="elu", work="training", batch=8, tokens=4_096, **wide),
        *(
            Case(mixing="window", work="training", batch=8, tokens=4_096, window=window, **wide)
            for window in (64, 512, 2_048)
        ),
        Case(mixing="conv_silu", work="forward", batch=8, tokens=4_096, taps=4),
        Case(mixing="conv_silu", work="training", batch=8, tokens=4_096, taps=4),
        Case(mixing="conv_gate", work="training", batch=8, tokens=4_096, taps=3),
    )


def inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Random inputs: q, k, v, the keys of a prefix, the state of a step, the gradient of y.

    Those of a short convolution are x, a gate, taps and a bias.
    """
    generator = torch.Generator(device).manual_seed(0)
    B, T, H, K, V = case.batch, case.tokens, case.heads, case.key_size, case.value_size

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(of)

    if case.taps:
        C = case.channels
        found = {"x": normal(B, T, C), "weight": normal(C, case.taps), "bias": normal(C)}
        found |= {"gate": normal(B, T, C)} if case.mixing == "conv_gate" else {}
        return found | ({"dy": normal(B, T, C)} if case.work == "training" else {})
    found = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    if case.work == "prefix":
        found |= {"k_first": normal(B, T // 2, H, K), "v_first": normal(B, T // 2, H, V)}
    if case.work == "step":
        F, wide = case.features, torch.float32
        found |= {"memory": normal(B, H, F, V, of=wide)}
        # Much of the constant: the denominator is that of a sequence, far from 0.
        found |= {"normaliser": normal(B, H, F, of=wide).index_fill(
            2, torch.zeros(1, dtype=torch.int64, device=device), 1_000.0)}  # fmt: skip
    if case.work == "training":
        found |= {"dy": normal(B, T, H, V)}
    return found
