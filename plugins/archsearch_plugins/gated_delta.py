"""Gated DeltaNet: a matrix memory that forgets, and corrects what it stored (arXiv:2412.06464).

Each of H heads has keys and queries of K = `head_dim` numbers and values of V = `expand_v` K. All
three pass a short convolution of `conv` taps (0: none) and SiLU; queries and keys are scaled to
length 1. The memory S decays, and is corrected along the key by what it predicts wrongly:

    alpha_t = exp(-exp(A_log) softplus(W_a x_t + dt_bias))
    beta_t = sigmoid(W_b x_t)
    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
    y_t = W_out (norm(S_t q_t) * SiLU(W_g x_t))

The decay is that of Mamba-2 (arXiv:2405.21060); the norm scales each head to root mean square 1,
times learned weights. `gate: false` leaves SiLU(W_g x) out.

The state is S, and the last inputs of the convolution.

Projections start as N(0, 1 / inputs), the decay such that half is forgotten in 700 tokens, and taps
within 0.1 of passing the current token on. Published are decays drawn between 1e-3 and 1.6 a token
and random taps, for many heads; with one or two, most draws forget a key before its query comes.
Left out are negative eigenvalues (beta up to 2) and the published scale of queries, K^-1/2, which
the norm undoes.

Shape suffixes: B batch, T tokens, D model width, H heads, K key size, V value size, C channels of
the convolution, P = conv - 1 tokens carried in.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from archsearch_kernels.gated_delta import gated_delta
from archsearch_kernels.norm import rms_norm, unit
from archsearch_kernels.precision import accumulator
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

INITIAL_DECAY = 1e-3
"""-log(alpha) at the start: half is forgotten after 700 tokens."""

CONV_NOISE = 0.1
"""Taps start within this of passing the current token on; random taps mix keys with neighbours."""


class GatedDelta(Mixer):
    """A matrix memory per head that forgets, and corrects what it stored under a key."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        heads: Annotated[int, Choice(1, 2, 4), "independent memories"] = 2
        head_dim: Annotated[int, Choice(8, 16, 32, 64), "size of queries and keys of a head"] = 32
        expand_v: Annotated[int, Choice(1, 2), "size of a value over the size of a key"] = 2
        conv: Annotated[int, Choice(0, 4), "taps of the convolution on q, k and v; 0: none"] = 4
        gate: Annotated[bool, "gate the output by SiLU of a projection"] = True

        decays: ClassVar[bool] = True
        """False: nothing is forgotten but by correction (`delta_net`)."""

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

        def zoology_state_elements(self, context_len: int) -> int:
            return self.heads * self.value_dim * self.head_dim  # without the convolution's inputs

        def flops(self, context_len: int) -> int:
            values = self.heads * self.value_dim
            outputs = self.channels + (2 if self.gate else 1) * values + self.rates * self.heads
            taps = 2 * self.conv * self.channels
            memory = (7 if self.decays else 6) * values * self.head_dim  # decay; predict, write,
            return 2 * self.d_model * outputs + taps + memory  # and read 2 each

        @property
        def rates(self) -> int:
            """Rates of each head: of correction, and of decay if there is one."""
            return 2 if self.decays else 1

    config: Config
    kernels: ClassVar = {
        "gated_delta": ("reference", "chunked"),
        "short_conv": ("reference", "triton"),
    }
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        values = config.heads * config.value_dim
        self.qkv = nn.Linear(config.d_model, config.channels, bias=False)
        self.rates = nn.Linear(config.d_model, config.rates * config.heads, bias=False)
        gated = (nn.Linear(config.d_model, values, bias=False),) if config.gate else ()
        if gated:
            self.gate = gated[0]
        self.out = nn.Linear(values, config.d_model, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(config.value_dim))
        if config.decays:
            self.A_log = nn.Parameter(torch.zeros(config.heads))
            bias = math.log(math.expm1(INITIAL_DECAY))  # softplus gives the decay back
            self.dt_bias = nn.Parameter(torch.full((config.heads,), bias))
        if config.conv:
            weight_CJ = torch.empty(config.channels, config.conv).uniform_(-CONV_NOISE, CONV_NOISE)
            weight_CJ[:, -1] += 1
            self.conv_weight = nn.Parameter(weight_CJ)
        for linear in (self.qkv, self.rates, *gated, self.out):
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
                silu=True,
                backend=self.backends["short_conv"],
            )
        else:
            qkv_BTC = F.silu(qkv_BTC)
        keys, values = config.heads * config.head_dim, config.heads * config.value_dim
        q, k, v = (
            part.unflatten(-1, (config.heads, -1))
            for part in qkv_BTC.split((keys, keys, values), dim=-1)
        )
        log_decay_BTH, beta_BTH = self._rates(x_BTD)
        y_BTHV, memory = gated_delta(
            unit(q),
            unit(k),
            v,
            log_decay_BTH,
            beta_BTH,
            state_BHVK=None if state is None else state["memory"],
            keep_state=state is not None,
            backend=self.backends["gated_delta"],
        )
        y_BTC = rms_norm(y_BTHV, self.norm_weight).flatten(-2)
        if config.gate:
            y_BTC = y_BTC * F.silu(self.gate(x_BTD))
        return self.out(y_BTC), memory, tail_BPC

    def _rates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(alpha) and beta per head, in fp32 at least."""
        rates = self.rates(x_BTD)
        compute = accumulator(rates.dtype)
        *decay, beta_BTH = rates.to(compute).split(self.config.heads, dim=-1)
        if not self.config.decays:
            return torch.zeros_like(beta_BTH), beta_BTH.sigmoid()
        speed_BTH = F.softplus(decay[0] + self.dt_bias.to(compute))
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
