"""Channel mixing of RWKV-4 (Peng et al., arXiv:2305.13048, eq. 16-18).

    k_t = W_k (m_k x_t + (1 - m_k) x_{t-1})
    r_t = W_r (m_r x_t + (1 - m_r) x_{t-1})
    y_t = sigmoid(r_t) * W_v max(k_t, 0)^2

The MLP of RWKV-4. It looks back one token, so it is a layer of its own with the last token as its
state, and stands after each `rwkv4`. The mixing shares m start at 1/2, the weights as
N(0, 0.02^2); the published start differs by depth, which a mixer does not know.

Shape suffixes: B batch, T tokens, D model width, F inner width.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

INIT_STD = 0.02
"""Standard deviation of every weight matrix."""


class RwkvChannel(Mixer):
    """RWKV-4's gated MLP with squared ReLU over this token and the last."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        ratio: Annotated[float, Choice(2.0, 4.0), "inner width over model width"] = 4.0

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
            return (StateTensor("last", (self.d_model,), dtype),)

        def flops(self, context_len: int) -> int:
            return 4 * self.d_model * self.inner + 2 * self.d_model**2 + 8 * self.d_model

    config: Config
    residual_projections: ClassVar = ("value.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.key = nn.Linear(config.d_model, config.inner, bias=False)
        self.receptance = nn.Linear(config.d_model, config.d_model, bias=False)
        self.value = nn.Linear(config.inner, config.d_model, bias=False)
        self.mix_key = nn.Parameter(torch.full((config.d_model,), 0.5))
        self.mix_receptance = nn.Parameter(torch.full((config.d_model,), 0.5))
        for linear in (self.key, self.receptance, self.value):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        last_BTD = torch.cat((state["last"][:, None], x_BTD[:, :-1]), dim=1)
        key_BTF = self.key(torch.lerp(last_BTD, x_BTD, self.mix_key))
        gate_BTD = self.receptance(torch.lerp(last_BTD, x_BTD, self.mix_receptance)).sigmoid()
        y_BTD = gate_BTD * self.value(F.relu(key_BTF).square())
        return y_BTD, {"last": x_BTD[:, -1].clone()}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new = self.mix(x_BD[:, None], state)
        state["last"].copy_(new["last"])
        return y_B1D.squeeze(1), state
