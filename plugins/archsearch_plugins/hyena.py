"""Hyena: a gated convolution whose filter is as long as the sequence (arXiv:2302.10866, order 2).

One projection and a short convolution of `conv` taps give three streams q, k and v of width D, and

    u_t = k_t * v_t
    y_t = W_out (q_t * (sum_{j <= t} h_j u_{t-j} + b * u_t))

The filter h is not stored but computed. With the age s = j / `max_len` and B = `bands` frequencies
f evenly from 1e-4 to B - 1, as the authors space them,

    z_j = (s, cos(2 pi f s), sin(2 pi f s))
    h_j = exp(-r s) * W_3 sin(w * (W_2 sin(w * (W_1 sin(w * (W_0 z_j))))))    (biases not shown)

The window's rate r goes from ln(100) / 1.5 in the first channel to ln(100) / 0.3 in the last, and
is not learned.

Ages count from the token itself and `max_len` is a constant of the mixer, not the length of a
sequence: a filter is the same whatever the context and wherever a sequence is cut. `max_len` is the
published code's longest input. Beyond it the filter goes on, and its window with it.

Order 2 has one long convolution between two gates, as in the authors' code. Left out are higher
orders, heads and dropout, and the learned features z with a learning rate of their own.

The state is every u so far, up to one less than the context, the last inputs of the short
convolution, and the filter: L taps for a context of L tokens, computed when the state is made. What
is older is forgotten. The taps are those of every sequence, so a server might keep them once beside
the weights, which would halve the state; for the same reason `flops` leaves out what they cost.

Projections start as N(0, 1 / inputs), those of queries and keys as equals; short taps pass on the
current token, for keys the one before: a value is bound to its predecessor from the start, and the
same token brings it back. The rest is as published (torch's default for the filter's layers, w = 1,
b from N(0, 1)). On the recipe `tiny` at 1e-2, three seeds recall 0.70 to 0.75 of 4 pairs after two
epochs, and 0.13 to 0.25 with independent projections and taps.

Shape suffixes: B batch, T tokens, D model width, J taps of a filter, P tokens of a state, F
features of an age, W width of the filter's layers.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from archsearch_kernels.long_conv import long_conv
from archsearch_kernels.precision import accumulator
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice, Range

CONV_NOISE = 0.1
"""Short taps start within this of passing the current token on."""

FLOOR = 0.01
SLOW, FAST = 1.5, 0.3
"""The slowest window falls to the floor after 1.5 `max_len` tokens, the fastest after 0.3."""

LOWEST = 1e-4
"""The first frequency of an age; the published features start here and not at 0."""

HIDDEN = 3
"""Layers of the filter before the last one, each with a sine."""


class Hyena(Mixer):
    """Looks at a token by its age, through a filter without end."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        max_len: Annotated[
            int, Range(64, 4096, scale="log2"), "tokens over which filters and windows stretch"
        ] = 1024
        filter_dim: Annotated[int, Choice(16, 32, 64), "width of the filter's layers"] = 64
        bands: Annotated[int, Choice(1, 2, 8), "frequencies that describe an age"] = 8
        conv: Annotated[int, Choice(2, 3, 4), "taps of the short convolution"] = 3

        def __post_init__(self) -> None:
            for name in ("max_len", "filter_dim", "bands"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if self.conv < 2:
                raise ValueError(f"conv is {self.conv}; it must be at least 2")

        @property
        def features(self) -> int:
            """Numbers that describe an age."""
            return 1 + 2 * self.bands

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            return (
                StateTensor("past", (max(context_len, 1) - 1, self.d_model), dtype),
                StateTensor("filter", (max(context_len, 1), self.d_model), dtype),
                StateTensor("tail", (self.conv - 1, 3 * self.d_model), dtype),
            )

        def zoology_state_elements(self, context_len: int) -> int:
            return self.d_model * context_len

        def flops(self, context_len: int) -> int:
            width = self.d_model
            taps = (context_len + 1) / 2  # on average over the context
            return round(8 * width**2 + 6 * self.conv * width + 4 * width + taps * 2 * width)

    config: Config
    kernels: ClassVar = {"long_conv": ("reference", "fft"), "short_conv": ("reference", "triton")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width, layer = config.d_model, config.filter_dim
        self.inner = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        for linear in (self.inner, self.out):
            nn.init.normal_(linear.weight, std=width**-0.5)
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.inner.weight[width : 2 * width] = self.inner.weight[:width]
        taps_CJ = torch.empty(3 * width, config.conv).uniform_(-CONV_NOISE, CONV_NOISE)
        taps_CJ[:, -1] += 1
        taps_CJ[width : 2 * width] = taps_CJ[width : 2 * width].roll(-1, 1)  # keys: one token late
        self.conv_weight = nn.Parameter(taps_CJ)
        self.conv_bias = nn.Parameter(torch.zeros(3 * width))
        sizes = (config.features, *(layer for _ in range(HIDDEN)))
        self.filter_hidden = nn.ModuleList(nn.Linear(before, layer) for before in sizes[:-1])
        self.filter_out = nn.Linear(layer, width, bias=False)
        self.frequency = nn.Parameter(torch.ones(layer))
        self.bias = nn.Parameter(torch.randn(width))

    def init_state(
        self, batch: int, context_len: int, dtype: torch.dtype, device: torch.device | str
    ) -> State:
        """The empty state, with the filter in it."""
        state = super().init_state(batch, context_len, dtype, device)
        return state | {"filter": self._filter(max(context_len, 1), dtype).repeat(batch, 1, 1)}

    def _filter(self, taps: int, dtype: torch.dtype) -> Tensor:
        """The first taps of the filter, (J, D), computed in fp32 at least."""
        config, device, compute = self.config, self.bias.device, accumulator(dtype)
        age_J1 = torch.arange(taps, device=device, dtype=torch.float64)[:, None] / config.max_len
        bands_F = torch.linspace(
            LOWEST, config.bands - 1, config.bands, device=device, dtype=torch.float64
        )
        angle_JF = 2 * math.pi * bands_F * age_J1
        x_JW = torch.cat((age_J1, angle_JF.cos(), angle_JF.sin()), dim=1).to(compute)
        frequency_W = self.frequency.to(compute)
        for layer in self.filter_hidden:
            x_JW = (frequency_W * _wide(layer, x_JW)).sin()
        slow, fast = -math.log(FLOOR) / SLOW, -math.log(FLOOR) / FAST
        rate_D = torch.linspace(slow, fast, config.d_model, device=device, dtype=torch.float64)
        window_JD = (-rate_D * age_J1).exp()
        return (_wide(self.filter_out, x_JW) * window_JD.to(compute)).to(dtype)

    def _mix(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor | None, Tensor]:
        if state is None:
            past_BPD, tail_BPC, filter_JD = None, None, self._filter(x_BTD.shape[1], x_BTD.dtype)
        else:  # all rows have the same filter
            past_BPD, tail_BPC, filter_JD = state["past"], state["tail"], state["filter"][0]
        streams, tail_BPC = short_conv(
            self.inner(x_BTD),
            self.conv_weight,
            self.conv_bias,
            tail_BPC=tail_BPC,
            backend=self.backends["short_conv"],
        )
        q_BTD, k_BTD, v_BTD = streams.chunk(3, dim=-1)
        u_BTD = k_BTD * v_BTD
        y_BTD, past_BPD = long_conv(
            u_BTD,
            filter_JD,
            tail_BPC=past_BPD,
            keep_state=state is not None,
            backend=self.backends["long_conv"],
        )
        return self.out(q_BTD * (y_BTD + self.bias * u_BTD)), past_BPD, tail_BPC

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, past_BPD, tail_BPC = self._mix(x_BTD, state)
        assert past_BPD is not None
        return y_BTD, {"past": past_BPD, "filter": state["filter"], "tail": tail_BPC}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name in ("past", "tail"):
            state[name].copy_(new_state[name])
        return y_B1D.squeeze(1), state


def _wide(layer: nn.Module, x_JW: Tensor) -> Tensor:
    """A layer of the filter in the dtype of its input: filters are as exact as sums."""
    assert isinstance(layer, nn.Linear)
    bias = None if layer.bias is None else layer.bias.to(x_JW.dtype)
    return F.linear(x_JW, layer.weight.to(x_JW.dtype), bias)
