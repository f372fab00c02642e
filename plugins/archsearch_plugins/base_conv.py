"""BaseConv: a short causal convolution gated by a projection (arXiv:2312.04927, section 4).

    y = conv(x) * (W x + b) + x

This is the form of the published recall recipe, with its own residual and no activation. The state
is the last `kernel - 1` inputs.

Shape suffixes: B batch, T tokens, D model width, P = kernel - 1 tokens.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

GATE_STD = 0.02
"""Start of the gate, as in the published recall recipe: the layer starts close to passing on x."""


class BaseConv(Mixer):
    """Compares and shifts neighbours at almost no state."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        kernel: Annotated[int, Choice(2, 3, 4), "tokens a token sees, itself included"] = 3

        def __post_init__(self) -> None:
            if self.kernel < 2:
                raise ValueError(f"kernel is {self.kernel}; it must be at least 2")

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            return (StateTensor("tail", (self.kernel - 1, self.d_model), dtype),)

        def flops(self, context_len: int) -> int:
            return 2 * self.d_model**2 + self.d_model * (2 * self.kernel + 3)

    config: Config
    kernels: ClassVar = {"short_conv": ("reference",)}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width, kernel = config.d_model, config.kernel
        self.conv_weight = nn.Parameter(torch.empty(width, kernel))
        self.conv_bias = nn.Parameter(torch.empty(width))
        self.gate = nn.Linear(width, width)
        for parameter in (self.conv_weight, self.conv_bias):
            nn.init.uniform_(parameter, -(kernel**-0.5), kernel**-0.5)
        nn.init.normal_(self.gate.weight, std=GATE_STD)
        nn.init.zeros_(self.gate.bias)

    def _mix(self, x_BTD: Tensor, tail_BPD: Tensor | None) -> tuple[Tensor, Tensor]:
        conv_BTD, tail_BPD = short_conv(
            x_BTD,
            self.conv_weight,
            self.conv_bias,
            tail_BPC=tail_BPD,
            backend=self.backends["short_conv"],
        )
        return conv_BTD * self.gate(x_BTD) + x_BTD, tail_BPD

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, tail_BPD = self._mix(x_BTD, state["tail"])
        return y_BTD, {"tail": tail_BPD}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, tail_BPD = self._mix(x_BD[:, None], state["tail"])
        state["tail"].copy_(tail_BPD)
        return y_B1D.squeeze(1), state
