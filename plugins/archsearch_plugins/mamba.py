"""Mamba: a selective state space (S6) between a short convolution and a gate (arXiv:2312.00752).

One projection gives C = `expand` D channels u and as many gates z. With N = `state_dim` states h in
each channel and a rank R for step sizes,

    x_t = SiLU(conv(u)_t + bias)
    r_t, B_t, C_t = W_x x_t                       (R, N and N numbers)
    dt_t = softplus(W_dt r_t + b_dt)              (one for each channel)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t
    out_t = W_out (SiLU(z_t) * (C_t h_t + D x_t))

`norm_bcdt` scales r, B and C to root mean square 1 before use: `plain` as Falcon-Mamba does
(arXiv:2410.05355), `weighted` with a learned weight on each number as Jamba does
(arXiv:2403.19887). `dt_rank` 0 means the published D / 16, rounded up.

The state is h, and the last inputs of the convolution. Published state sizes of the recall figure
leave the latter out.

Rates A = -1 ... -N, D = 1, W_dt and its bias (steps log-uniform in [0.001, 0.1]) start as
published. Projections are N(0, 1 / inputs), and taps pass the current token on. Of ours is a
pairing: the channels are two halves with the same projection, one of which starts a token late; B
reads the late half, C the other with the same weights, both four times as large. So a value is
written under its predecessor, and the same token brings it back. On the recipe `tiny` at 1e-2, two
seeds recall 0.97 and 1.00 of 4 pairs after two epochs; with random taps, and B and C apart, it was
0.20 and 0.21. With a norm, which takes the gain away, learning is slow as well.

Left out are the fused paths of the authors' kernels.

Shape suffixes: B batch, T tokens, D model width, C channels, N states of a channel, R rank of the
step sizes, J taps, P = J - 1 tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from archsearch_kernels.norm import rms_norm
from archsearch_kernels.precision import accumulator
from archsearch_kernels.selective_scan import selective_scan
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

SLOWEST, FASTEST = 1e-3, 1e-1
"""Step sizes at the start lie between these."""

CONV_NOISE = 0.1
"""Taps start within this of passing the current token on; random taps mix keys with neighbours."""

GAIN = 4.0
"""B and C start this many times larger than their inputs: steps of 0.01 make writes small."""

NORMS = ("none", "plain", "weighted")


class S6(nn.Module):
    """Short convolution, SiLU and selective scan of given channels; other mixers build on it.

    Args:
        rank: numbers that the step sizes of all channels are made of.
        norm: one of `NORMS`.
    """

    def __init__(self, channels: int, state_dim: int, taps: int, rank: int, norm: str) -> None:
        super().__init__()
        self.rank, self.state_dim, self.norm = rank, state_dim, norm
        self.conv_weight = nn.Parameter(torch.empty(channels, taps))
        self.conv_bias = nn.Parameter(torch.zeros(channels))
        self.x_proj = nn.Linear(channels, rank + 2 * state_dim, bias=False)
        self.dt_proj = nn.Linear(rank, channels, bias=False)
        nn.init.uniform_(self.conv_weight, -CONV_NOISE, CONV_NOISE)
        with torch.no_grad():
            self.conv_weight[:, -1] += 1
        nn.init.normal_(self.x_proj.weight, std=channels**-0.5)
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        steps_C = torch.empty(channels).uniform_(math.log(SLOWEST), math.log(FASTEST)).exp()
        self.dt_bias = nn.Parameter(steps_C.expm1().log())  # softplus gives the steps back
        rates_N = torch.arange(1, state_dim + 1, dtype=torch.float32)
        self.A_log = nn.Parameter(rates_N.log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))
        if norm == "weighted":
            self.dt_norm = nn.Parameter(torch.ones(rank))
            self.B_norm = nn.Parameter(torch.ones(state_dim))
            self.C_norm = nn.Parameter(torch.ones(state_dim))

    def forward(
        self,
        u_BTC: Tensor,
        memory_BCN: Tensor | None,
        tail_BPC: Tensor | None,
        backends: dict[str, str],
        keep_state: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return C h + D x, the states (None if not kept) and the convolution's next tail."""
        x_BTC, tail_BPC = short_conv(
            u_BTC,
            self.conv_weight,
            self.conv_bias,
            tail_BPC=tail_BPC,
            silu=True,
            backend=backends["short_conv"],
        )
        rank_BTR, write_BTN, read_BTN = self.x_proj(x_BTC).split(
            (self.rank, self.state_dim, self.state_dim), dim=-1
        )
        if self.norm == "weighted":
            rank_BTR = rms_norm(rank_BTR, self.dt_norm)
            write_BTN = rms_norm(write_BTN, self.B_norm)
            read_BTN = rms_norm(read_BTN, self.C_norm)
        elif self.norm == "plain":
            rank_BTR, write_BTN, read_BTN = map(rms_norm, (rank_BTR, write_BTN, read_BTN))
        compute = accumulator(x_BTC.dtype)
        steps_BTC = F.softplus(self.dt_proj(rank_BTR).to(compute) + self.dt_bias.to(compute))
        y_BTC, memory_BCN = selective_scan(
            x_BTC,
            steps_BTC,
            -self.A_log.to(compute).exp(),
            write_BTN,
            read_BTN,
            self.D,
            state_BCN=memory_BCN,
            keep_state=keep_state,
            backend=backends["selective_scan"],
        )
        return y_BTC, memory_BCN, tail_BPC


def s6_flops(channels: int, state_dim: int, taps: int, rank: int) -> int:
    """FLOPs of one token in `S6`: convolution, projections, and seven for each state."""
    projections = 2 * channels * (rank + 2 * state_dim) + 2 * rank * channels
    # A state: dt A, exp, decay, write 2, read 2.
    return projections + channels * (2 * taps + 7 * state_dim + 6)


class Mamba(Mixer):
    """Decays, writes and reads that depend on the token."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        state_dim: Annotated[int, Choice(8, 16, 24, 32, 64), "states of each channel"] = 16
        expand: Annotated[int, Choice(1, 2), "channels over the model width"] = 2
        conv: Annotated[int, Choice(2, 3, 4), "taps of the convolution"] = 4
        dt_rank: Annotated[int, "rank of the step sizes; 0: width / 16, rounded up"] = 0
        norm_bcdt: Annotated[
            str, Choice(*NORMS), "norm of B, C and the step sizes: none, plain or weighted"
        ] = "none"

        def __post_init__(self) -> None:
            for name in ("state_dim", "expand"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if self.conv < 2:
                raise ValueError(f"conv is {self.conv}; it must be at least 2")
            if self.dt_rank < 0:
                raise ValueError(f"dt_rank is {self.dt_rank}; it must be at least 0")
            if self.norm_bcdt not in NORMS:
                raise ValueError(
                    f"norm_bcdt is '{self.norm_bcdt}'; it must be one of: {', '.join(NORMS)}"
                )

        @property
        def channels(self) -> int:
            """Channels that keep states."""
            return self.expand * self.d_model

        def canonical(self) -> Self:
            usual = replace(self, dt_rank=0)
            return usual if usual.rank == self.rank else self

        @property
        def rank(self) -> int:
            """Numbers that the step sizes of all channels are made of."""
            return self.dt_rank or math.ceil(self.d_model / 16)

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            return (
                StateTensor("memory", (self.channels, self.state_dim), accumulator(dtype)),
                StateTensor("tail", (self.conv - 1, self.channels), dtype),
            )

        def zoology_state_elements(self, context_len: int) -> int:
            return self.channels * self.state_dim

        def flops(self, context_len: int) -> int:
            inner = s6_flops(self.channels, self.state_dim, self.conv, self.rank)
            return 6 * self.d_model * self.channels + inner + 2 * self.channels

    config: Config
    kernels: ClassVar = {
        "selective_scan": ("reference", "associative"),
        "short_conv": ("reference", "triton"),
    }
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.inner = nn.Linear(config.d_model, 2 * config.channels, bias=False)
        self.s6 = S6(config.channels, config.state_dim, config.conv, config.rank, config.norm_bcdt)
        self.out = nn.Linear(config.channels, config.d_model, bias=False)
        for linear in (self.inner, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        self._start_in_pairs()

    @torch.no_grad()
    def _start_in_pairs(self) -> None:
        """Channels come in two equal halves: late ones, which B reads, and current ones, which C
        reads with the same weights."""
        half, N = self.config.channels // 2, self.config.state_dim
        self.inner.weight[half : 2 * half] = self.inner.weight[:half]
        self.s6.conv_weight[:half] = self.s6.conv_weight[:half].roll(-1, 1)
        keys_NC = torch.randn(N, half) * GAIN / max(half, 1) ** 0.5
        weight = self.s6.x_proj.weight
        weight[self.config.rank :] = 0
        weight[self.config.rank : -N, :half] = keys_NC
        weight[-N:, half : 2 * half] = keys_NC

    def _mix(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor | None, Tensor]:
        u_BTC, z_BTC = self.inner(x_BTD).chunk(2, dim=-1)
        memory, tail = (None, None) if state is None else (state["memory"], state["tail"])
        y_BTC, memory, tail = self.s6(u_BTC, memory, tail, self.backends, state is not None)
        return self.out(y_BTC * F.silu(z_BTC)), memory, tail

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
