"""Gated MLP with SiLU (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. 6).

    y = W_down (silu(W_gate x) * W_up x)

Looks at one position at a time and keeps no state: it follows every sequence mixer as
`channel_mixer: swiglu`, and may stand as a layer of its own. No biases. The inner width is
`ratio` times the model width, rounded. Weights start as N(0, 0.02^2).

Shape suffixes: D model width, F inner width; ... any leading dimensions.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

INIT_STD = 0.02
"""Standard deviation of every weight, as in GPT-2."""


class SwiGlu(Mixer):
    """A gated MLP; a channel mixer."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        ratio: Annotated[float, Choice(1.0, 2.0, 4.0), "inner width over model width"] = 4.0

        def __post_init__(self) -> None:
            if self.inner < 1:
                raise ValueError(
                    f"ratio {self.ratio:g} of width {self.d_model} leaves no inner feature"
                )

        def canonical(self) -> Self:
            return replace(self, ratio=self.inner / self.d_model)

        @property
        def inner(self) -> int:
            """Inner width in features."""
            return round(self.ratio * self.d_model)

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            return ()

        def zoology_state_elements(self, context_len: int) -> int:
            return 0

        def flops(self, context_len: int) -> int:
            return 6 * self.d_model * self.inner

    config: Config
    per_token: ClassVar = True
    residual_projections: ClassVar = ("down.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gate_up = nn.Linear(config.d_model, 2 * config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.d_model, bias=False)
        for linear in (self.gate_up, self.down):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def forward(self, x_D: Tensor) -> Tensor:
        gate_F, up_F = self.gate_up(x_D).chunk(2, dim=-1)
        y_D: Tensor = self.down(F.silu(gate_F) * up_F)
        return y_D

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        return self(x_BTD), {}
