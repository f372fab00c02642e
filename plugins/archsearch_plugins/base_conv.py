"""BaseConv: a short causal convolution gated by a projection (arXiv:2312.04927, arXiv:2402.18668).

Two forms go by this name. `form: zoology` is that of the published recall recipe, with a residual
of its own and no activation:

    y = conv(x) * (W x + b) + x

`form: based` is that of the BASED language models, where the inputs of the convolution are
projected first; u and z have C = `expand` D channels each, so that `expand: 2` is the published
`expand_proj` of 4:

    u, z = W_in x + b_in
    y = W_out (SiLU(conv(u)) * z) + b_out

`kernel` is the number of tokens that an output sees, itself included; each channel has its own
taps and a bias. The state is the last `kernel - 1` inputs of the convolution.

Taps and their biases start uniform within kernel^-1/2, as torch starts a convolution, and the gate
of the first form as N(0, 0.02^2), as published: the layer starts close to passing on x. Projections
of the second form are N(0, 1 / inputs). Left out are the published scaling of W_out with depth, and
the long convolutions that Zoology's BaseConv may also have; `hyena` has one.

Shape suffixes: B batch, T tokens, K positions asked for, D model width, C channels of the
convolution, P = kernel - 1 tokens.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor, rows
from archsearch.space import Range

GATE_STD = 0.02
"""Standard deviation of the gate of the form `zoology`, as in the published recall recipe."""

FORMS = ("zoology", "based")
EXPAND = 2
"""Inner width of the published BASED models, over the model width."""


class BaseConv(Mixer):
    """Compares and shifts neighbours at almost no state."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        kernel: Annotated[int, Range(2, 8), "tokens a token sees, itself included"] = 3
        form: Annotated[str, "zoology: gated inputs; based: projected before and after"] = "zoology"
        expand: Annotated[int, "inner width of the form based, over the model width"] = EXPAND

        def __post_init__(self) -> None:
            if self.kernel < 2:
                raise ValueError(f"kernel is {self.kernel}; it must be at least 2")
            if self.form not in FORMS:
                raise ValueError(f"form is '{self.form}'; it must be one of: {', '.join(FORMS)}")
            if self.expand < 1:
                raise ValueError(f"expand is {self.expand}; it must be at least 1")

        def canonical(self) -> Self:
            return self if self.form == "based" else replace(self, expand=EXPAND)

        @property
        def channels(self) -> int:
            """Channels of the convolution."""
            return self.d_model * (self.expand if self.form == "based" else 1)

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            return (StateTensor("tail", (self.kernel - 1, self.channels), dtype),)

        def zoology_state_elements(self, context_len: int) -> int:
            return self.channels * self.kernel

        def flops(self, context_len: int) -> int:
            taps = self.channels * 2 * self.kernel
            if self.form == "based":  # three projections; taps, bias, SiLU, gate; biases
                return 6 * self.d_model * self.channels + taps + 7 * self.channels + self.d_model
            return 2 * self.d_model**2 + taps + 3 * self.d_model

    config: Config
    kernels: ClassVar = {"short_conv": ("reference", "triton")}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kernel = config.kernel
        self.conv_weight = nn.Parameter(torch.empty(config.channels, kernel))
        self.conv_bias = nn.Parameter(torch.empty(config.channels))
        if config.form == "based":
            self.inner = nn.Linear(config.d_model, 2 * config.channels)
            self.out = nn.Linear(config.channels, config.d_model)
        else:
            self.gate = nn.Linear(config.d_model, config.d_model)
        for parameter in (self.conv_weight, self.conv_bias):
            nn.init.uniform_(parameter, -(kernel**-0.5), kernel**-0.5)
        for linear in (self.inner, self.out) if config.form == "based" else (self.gate,):
            std = GATE_STD if config.form == "zoology" else linear.in_features**-0.5
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def _mix(
        self, x_BTD: Tensor, tail_BPC: Tensor | None, at_BK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        asked = x_BTD if at_BK is None else rows(x_BTD, at_BK)
        if self.config.form == "zoology":
            return self._conv(x_BTD, self.gate(asked), tail_BPC, at_BK)
        if at_BK is None:
            u_BTC, z = self.inner(x_BTD).chunk(2, dim=-1)
        else:
            (u_weight, z_weight), (u_bias, z_bias) = (
                part.chunk(2) for part in (self.inner.weight, self.inner.bias)
            )
            u_BTC, z = F.linear(x_BTD, u_weight, u_bias), F.linear(asked, z_weight, z_bias)
        gated, tail_BPC = self._conv(u_BTC, z, tail_BPC, at_BK)
        return self.out(gated), tail_BPC

    def _conv(
        self, u_BTC: Tensor, gate: Tensor, tail_BPC: Tensor | None, at_BK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        is_based = self.config.form == "based"
        return short_conv(
            u_BTC,
            self.conv_weight,
            self.conv_bias,
            gate_BTC=gate,
            tail_BPC=tail_BPC,
            silu=is_based,
            residual=not is_based,
            at_BK=at_BK,
            backend=self.backends["short_conv"],
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def outputs_at(self, x_BTD: Tensor, at_BK: Tensor) -> Tensor:
        return self._mix(x_BTD, None, at_BK)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, tail_BPC = self._mix(x_BTD, state["tail"])
        return y_BTD, {"tail": tail_BPC}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, tail_BPC = self._mix(x_BD[:, None], state["tail"])
        state["tail"].copy_(tail_BPC)
        return y_B1D.squeeze(1), state
