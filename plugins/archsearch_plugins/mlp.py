"""Plain MLP with GELU (Hendrycks and Gimpel, arXiv:1606.08415), as in GPT-2.

    y = W_down gelu(W_up x)

Looks at one position at a time and keeps no state: it follows every sequence mixer as
`channel_mixer: mlp`, and may stand as a layer of its own. No biases. The inner width is `ratio`
times the model width, rounded. Weights start as N(0, 0.02^2).

Shape suffixes: D model width, F inner width; ... any leading dimensions.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from archsearch.mixer import Mixer, State
from archsearch_plugins.swiglu import INIT_STD, SwiGlu


class Mlp(Mixer):
    """A plain MLP; a channel mixer."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SwiGlu.Config):
        def flops(self, context_len: int) -> int:
            return 4 * self.d_model * self.inner

    config: Config
    per_token: ClassVar = True
    residual_projections: ClassVar = ("down.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.up = nn.Linear(config.d_model, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.d_model, bias=False)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def forward(self, x_D: Tensor) -> Tensor:
        y_D: Tensor = self.down(F.gelu(self.up(x_D)))
        return y_D

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        return self(x_BTD), {}
