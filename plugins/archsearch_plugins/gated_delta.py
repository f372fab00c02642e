"""Gated DeltaNet mixer (Yang et al., arXiv:2412.06464, section 3.4 and figure 1).

Queries, keys and values pass an optional short convolution and SiLU; queries and keys are scaled
to length 1. The memory decays by alpha = exp(-exp(A_log) softplus(W_a x + dt_bias)), as in Mamba-2
(arXiv:2405.21060), and is corrected at strength beta = sigmoid(W_b x). Each head's output is
RMS-normalised and gated by SiLU(W_g x).

Shape suffixes: B batch, T tokens, D model width, H heads, K key size, V value size, C channels of
the convolution, P = conv - 1 tokens carried in.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from archsearch_kernels.gated_delta import gated_delta
from archsearch_kernels.precision import accumulator
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

INITIAL_DECAY = 1e-3
"""-log(alpha) at the start: half is forgotten after 700 tokens.

Published are rates from 1e-3 to 1.6 a token, drawn for many heads. With one head or two, most draws
forget a key before its query comes, and the luck of its seed decides whether a copy learns.
"""

CONV_NOISE = 0.1
"""Taps start within this of passing the current token on; random taps mix keys with neighbours."""

NORM_EPSILON = 1e-6
"""Added to sums of squares."""


class GatedDelta(Mixer):
    """A matrix memory per head that forgets, and corrects what it stored under a key."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        heads: Annotated[int, Choice(1, 2, 4), "independent memories"] = 2
        head_dim: Annotated[int, Choice(8, 16, 32, 64), "size of queries and keys of a head"] = 32
        expand_v: Annotated[int, Choice(1, 2), "size of a value over the size of a key"] = 2
        conv: Annotated[int, Choice(0, 4), "taps of the convolution on q, k and v; 0: none"] = 4

        def __post_init__(self) -> None:
            for name in ("heads", "head_dim", "expand_v"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if self.conv < 0 or self.conv == 1:
                raise ValueError(f"conv is {self.conv}; it must be 0 or at least 2")

        @property
        def value_dim(self) -> int:
            """Size of the values of one head."""
            return self.head_dim * self.expand_v

        @property
        def channels(self) -> int:
            """Channels of the convolution: queries, keys and values of all heads."""
            return self.heads * (2 * self.head_dim + self.value_dim)

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            shape = (self.heads, self.value_dim, self.head_dim)
            memory = StateTensor("memory", shape, accumulator(dtype))
            tail = StateTensor("tail", (self.conv - 1, self.channels), dtype)
            return (memory, tail) if self.conv else (memory,)

        def flops(self, context_len: int) -> int:
            values = self.heads * self.value_dim
            projections = 2 * self.d_model * (self.channels + 2 * values + 2 * self.heads)
            taps = 2 * self.conv * self.channels
            return (
                projections + taps + 7 * values * self.head_dim
            )  # decay 1; predict, write, read 2

    config: Config
    kernels: ClassVar = {"gated_delta": ("reference", "chunked"), "short_conv": ("reference",)}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        values = config.heads * config.value_dim
        self.qkv = nn.Linear(config.d_model, config.channels, bias=False)
        self.rates = nn.Linear(config.d_model, 2 * config.heads, bias=False)
        self.gate = nn.Linear(config.d_model, values, bias=False)
        self.out = nn.Linear(values, config.d_model, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(config.value_dim))
        self.A_log = nn.Parameter(torch.zeros(config.heads))
        bias = math.log(math.expm1(INITIAL_DECAY))  # softplus gives the decay back
        self.dt_bias = nn.Parameter(torch.full((config.heads,), bias))
        if config.conv:
            weight_CJ = torch.empty(config.channels, config.conv).uniform_(-CONV_NOISE, CONV_NOISE)
            weight_CJ[:, -1] += 1
            self.conv_weight = nn.Parameter(weight_CJ)
        for linear in (self.qkv, self.rates, self.gate, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def _mix(
        self, x_BTD: Tensor, state: State | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output, the memory (None without a state) and the convolution's tail."""
        config, tail_BPC = self.config, None
        qkv_BTC = self.qkv(x_BTD)
        if config.conv:
            qkv_BTC, tail_BPC = short_conv(
                qkv_BTC,
                self.conv_weight,
                tail_BPC=None if state is None else state["tail"],
                backend=self.backends["short_conv"],
            )
        keys, values = config.heads * config.head_dim, config.heads * config.value_dim
        q, k, v = (
            part.unflatten(-1, (config.heads, -1))
            for part in F.silu(qkv_BTC).split((keys, keys, values), dim=-1)
        )
        log_decay_BTH, beta_BTH = self._rates(x_BTD)
        y_BTHV, memory = gated_delta(
            _unit(q),
            _unit(k),
            v,
            log_decay_BTH,
            beta_BTH,
            state_BHVK=None if state is None else state["memory"],
            keep_state=state is not None,
            backend=self.backends["gated_delta"],
        )
        gate_BTHV = F.silu(self.gate(x_BTD)).unflatten(-1, (config.heads, -1))
        scale_V = self.norm_weight * config.value_dim**0.5  # root mean square 1 from length 1
        y_BTHV = _unit(y_BTHV) * scale_V * gate_BTHV
        return self.out(y_BTHV.flatten(-2)), memory, tail_BPC

    def _rates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(alpha) and beta per head, in fp32 at least."""
        rates = self.rates(x_BTD)
        compute = torch.promote_types(rates.dtype, torch.float32)
        decay_BTH, beta_BTH = rates.to(compute).chunk(2, dim=-1)
        speed_BTH = F.softplus(decay_BTH + self.dt_bias.to(compute))
        return -self.A_log.to(compute).exp() * speed_BTH, beta_BTH.sigmoid()

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, memory, tail = self._mix(x_BTD, state)
        assert memory is not None
        return y_BTD, {"memory": memory} if tail is None else {"memory": memory, "tail": tail}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state


def _unit(x_K: Tensor) -> Tensor:
    """Scale to length 1; the sum of squares is in fp32 at least."""
    wide = x_K.to(torch.promote_types(x_K.dtype, torch.float32))
    length = wide.square().sum(-1, keepdim=True)
    return (wide * torch.rsqrt(length + NORM_EPSILON)).to(x_K.dtype)
