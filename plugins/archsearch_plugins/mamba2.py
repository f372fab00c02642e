"""Mamba-2: a state space with one decay for each head, as linear attention (arXiv:2405.21060).

One projection gives C = `expand` D channels u, as many gates z, N = `state_dim` numbers each of b
and c, which all heads share, and a step size r for each of H = C / V heads of V channels:

    x_t, B_t, C_t = SiLU(conv(u, b, c)_t + bias)
    dt_t = softplus(r_t + dt_bias)                      (one for each head)
    S_t = exp(-dt_t exp(A_log)) S_{t-1} + B_t (dt_t x_t)^T
    out_t = W_out norm((S_t^T C_t + D x_t) * SiLU(z_t))

S is N x V numbers for each head. The norm is over all channels, to root mean square 1, times
learned weights. Against Mamba, the decay is one number for a head, no longer one for each channel
and state, so that a chunk of tokens is a few products of matrices. `head_dim` is V.

The state is S, and the last inputs of the convolution. Published state sizes of the recall figure
leave the latter out.

Decays exp(A_log) uniform in [1, 16], steps log-uniform in [0.001, 0.1] and D = 1 start as
published; so do 64 channels of a head, where they divide C. Projections are N(0, 1 / inputs), and
taps start within 0.1 of passing on one token. Of ours is a pairing: b starts with the weights of c
and its taps one token late, so that a value is written under its predecessor, and the same token
brings it back. On the recipe `tiny` at 1e-2 (width 32, 8 seeds, 2 epochs) 4 pairs are recalled at
0.94 to 1.00; without the pairing it was 0.04 to 0.97, 0.26 on average.

Left out are more than one group of B and C, bounds on the step sizes, and the authors' fused path.

Shape suffixes: B batch, T tokens, D model width, C channels, H heads, K = N states, V channels of
a head, J taps, P = J - 1 tokens carried in.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from archsearch_kernels.gated_linear import gated_linear
from archsearch_kernels.norm import rms_norm
from archsearch_kernels.precision import accumulator
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

LARGEST_HEAD = 64
"""Channels of a head, as published, where they divide the channels."""

SLOWEST, FASTEST = 1e-3, 1e-1
"""Step sizes at the start lie between these."""

CONV_NOISE = 0.1
"""Taps start within this of passing one token on; random taps mix keys with neighbours."""


class Mamba2(Mixer):
    """A matrix memory per head that forgets and writes as the token says."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        state_dim: Annotated[int, Choice(8, 16, 24, 32, 64, 128), "states of each channel"] = 32
        expand: Annotated[int, Choice(1, 2), "channels over the model width"] = 2
        conv: Annotated[int, Choice(2, 3, 4), "taps of the convolution"] = 4
        head_dim: Annotated[
            int, "channels that share a decay; 0: the largest divisor of all channels up to 64"
        ] = 0

        def __post_init__(self) -> None:
            for name in ("state_dim", "expand"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if self.conv < 2:
                raise ValueError(f"conv is {self.conv}; it must be at least 2")
            if self.head_dim < 0 or self.channels % self.head_size:
                raise ValueError(
                    f"head_dim is {self.head_dim}; it must divide the {self.channels} channels, "
                    "or be 0"
                )

        @property
        def channels(self) -> int:
            """Channels of all heads."""
            return self.expand * self.d_model

        def canonical(self) -> Self:
            usual = replace(self, head_dim=0)
            return usual if usual.head_size == self.head_size else self

        @property
        def head_size(self) -> int:
            """Channels of one head."""
            fitting = (n for n in range(LARGEST_HEAD, 0, -1) if self.channels % n == 0)
            return self.head_dim or next(fitting)

        @property
        def heads(self) -> int:
            return self.channels // self.head_size

        @property
        def convolved(self) -> int:
            """Channels of the convolution: x of all heads, and the B and C that they share."""
            return self.channels + 2 * self.state_dim

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            shape = (self.heads, self.state_dim, self.head_size)
            return (
                StateTensor("memory", shape, accumulator(dtype)),
                StateTensor("tail", (self.conv - 1, self.convolved), dtype),
            )

        def zoology_state_elements(self, context_len: int) -> int:
            return self.channels * self.state_dim  # without the convolution's inputs

        def flops(self, context_len: int) -> int:
            inner = 2 * self.d_model * (self.channels + self.convolved + self.heads)
            out = 2 * self.d_model * self.channels
            taps = (2 * self.conv + 5) * self.convolved
            # Memory: decay 1, write 2, read 2. Channels: dt x 1, D 2, norm 4, SiLU and gate 5.
            return inner + out + taps + 5 * self.channels * self.state_dim + 12 * self.channels

    config: Config
    kernels: ClassVar = {
        "gated_linear": ("reference", "parallel", "chunked"),
        "short_conv": ("reference", "triton"),
    }
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        C, H = config.channels, config.heads
        self.inner = nn.Linear(config.d_model, C + config.convolved + H, bias=False)
        self.out = nn.Linear(C, config.d_model, bias=False)
        for linear in (self.inner, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        weight_CJ = torch.empty(config.convolved, config.conv).uniform_(-CONV_NOISE, CONV_NOISE)
        weight_CJ[:, -1] += 1
        keys = slice(2 * C, 2 * C + config.state_dim)  # b in the projection; c follows
        with torch.no_grad():
            self.inner.weight[keys] = self.inner.weight[keys.stop : keys.stop + config.state_dim]
        late = slice(C, C + config.state_dim)  # b in the convolution, one token late
        weight_CJ[late] = weight_CJ[late].roll(-1, 1)
        self.conv_weight = nn.Parameter(weight_CJ)
        self.conv_bias = nn.Parameter(torch.zeros(config.convolved))
        steps_H = torch.empty(H).uniform_(math.log(SLOWEST), math.log(FASTEST)).exp()
        self.dt_bias = nn.Parameter(steps_H.expm1().log())  # softplus gives the steps back
        self.A_log = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(H))
        self.norm_weight = nn.Parameter(torch.ones(C))

    def _mix(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the output, the memory (None without a state) and the convolution's tail."""
        config, compute = self.config, accumulator(x_BTD.dtype)
        z_BTC, u_BTC, steps_BTH = self.inner(x_BTD).split(
            (config.channels, config.convolved, config.heads), dim=-1
        )
        u_BTC, tail_BPC = short_conv(
            u_BTC,
            self.conv_weight,
            self.conv_bias,
            tail_BPC=None if state is None else state["tail"],
            silu=True,
            backend=self.backends["short_conv"],
        )
        x_BTC, write_BTK, read_BTK = u_BTC.split(
            (config.channels, config.state_dim, config.state_dim), dim=-1
        )
        steps_BTH1 = F.softplus(steps_BTH.to(compute) + self.dt_bias.to(compute))[..., None]
        x_BTHV = x_BTC.unflatten(-1, (config.heads, -1))
        y_BTHV, memory = gated_linear(
            read_BTK[:, :, None],
            write_BTK[:, :, None],
            (steps_BTH1 * x_BTHV).to(x_BTHV.dtype),
            -steps_BTH1 * self.A_log.to(compute).exp()[:, None],
            state_BHKV=None if state is None else state["memory"],
            keep_state=state is not None,
            backend=self.backends["gated_linear"],
        )
        y_BTC = (y_BTHV + self.D[:, None] * x_BTHV).flatten(-2)
        return self.out(rms_norm(y_BTC * F.silu(z_BTC), self.norm_weight)), memory, tail_BPC

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, memory, tail = self._mix(x_BTD, state)
        assert memory is not None
        return y_BTD, {"memory": memory, "tail": tail}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state
