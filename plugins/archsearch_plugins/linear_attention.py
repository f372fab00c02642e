"""Linear attention with the second-order Taylor feature map (BASED, arXiv:2402.18668).

No decay, no positions, no normalisation of queries and keys. The state is the memory and the
normaliser over compact features: F = 1 + f + f(f+1)/2 for feature dimension f, 153 at 16.

Shape suffixes: B batch, T tokens, D model width, H heads, K feature dimension, V head size, F
features.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from archsearch_kernels.linear_attention import feature_size, linear_attention
from archsearch_kernels.precision import accumulator
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice, Range

INIT_STD = 0.02
"""Standard deviation of every projection, as in the published recall recipe."""


class LinearAttention(Mixer):
    """A fixed-size associative memory of all tokens, read through a polynomial kernel."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        feature_map: Annotated[str, Choice("taylor"), "map from keys to features"] = "taylor"
        feature_dim: Annotated[
            int, Range(4, 32, step=4), "size of queries and keys of one head, before the map"
        ] = 16
        heads: Annotated[int, Choice(1, 2, 4), "heads; divides the width"] = 1

        def __post_init__(self) -> None:
            if self.heads < 1 or self.d_model % self.heads:
                raise ValueError(f"heads is {self.heads}; it must divide the width {self.d_model}")
            if self.feature_dim < 1:
                raise ValueError(f"feature_dim is {self.feature_dim}; it must be at least 1")
            feature_size(self.feature_map, self.feature_dim)

        @property
        def features(self) -> int:
            """Features per head."""
            return feature_size(self.feature_map, self.feature_dim)

        @property
        def head_size(self) -> int:
            return self.d_model // self.heads

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            memory = (self.heads, self.features, self.head_size)
            return (
                StateTensor("memory", memory, accumulator(dtype)),
                StateTensor("normaliser", memory[:2], accumulator(dtype)),
            )

        def flops(self, context_len: int) -> int:
            projections = 4 * self.d_model * (self.heads * self.feature_dim + self.d_model)
            write_and_read = 4 * self.heads * self.features * (self.head_size + 1)
            feature_maps = 4 * self.heads * self.features
            return projections + write_and_read + feature_maps

    config: Config
    kernels: ClassVar = {"linear_attention": ("reference", "quadratic")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        inner = config.heads * config.feature_dim
        self.qk = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.value = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        for linear in (self.qk, self.value, self.out):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def _mix(
        self, x_BTD: Tensor, memory: Tensor | None, normaliser: Tensor | None, keep_state: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q, k = self.qk(x_BTD).unflatten(-1, (2, self.config.heads, -1)).unbind(2)
        v = self.value(x_BTD).unflatten(-1, (self.config.heads, -1))
        y_BTHV, memory, normaliser = linear_attention(
            q,
            k,
            v,
            feature_map=self.config.feature_map,
            memory_BHFV=memory,
            normaliser_BHF=normaliser,
            keep_state=keep_state,
            backend=self.backends["linear_attention"],
        )
        return self.out(y_BTHV.flatten(-2)), memory, normaliser

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None, None, False)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, memory, normaliser = self._mix(x_BTD, state["memory"], state["normaliser"], True)
        assert memory is not None and normaliser is not None
        return y_BTD, {"memory": memory, "normaliser": normaliser}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state
