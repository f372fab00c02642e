"""H3: a shift, a product, a diagonal state space and a gate (Fu et al., arXiv:2212.14052).

Queries, keys and values of width D are split into heads of p = `head_dim` numbers. A shift SSM
compares neighbours, and a diagonal SSM remembers the products of shifted keys and values:

    k'_t = sum_{j < N} s_j * k_{t-j}                       (s: N taps for each channel)
    u_t = k'_t v_t^T                                       (p x p numbers for each head)
    h_t = exp(dt (-a + i w)) h_{t-1} + u_t                 (N / 2 complex states for each of them)
    y_t = Re(c . h_t) + d u_t
    out_t = W_out (q_t^T y_t)

N is `state_dim` real numbers: a complex state is two, and stands for a conjugate pair. A head
shares dt, a, w, c and d among its p x p products. c carries the input weight of the zero-order
hold, c = 2 C (exp(dt A) - 1) / A with A = -a + i w, so that h sums plain inputs.

The start is S4D-Lin (arXiv:2206.11893) with the published steps: a = 1/2, w = pi n, dt log-uniform
in [0.001, 0.1]. Of ours are: C is complex normal times 0.1 / dt, so that slow memories are read as
loudly as fast ones; the shift passes the previous key on, and queries and keys start as equals, so
that a value is bound to its predecessor and the same token brings it back. Projections are N(0, 1 /
inputs). On the recipe `tiny` at 1e-2, three seeds recall 0.84 to 0.90 of 4 pairs after two epochs;
with C, shift and keys as published it was 0.08 to 0.15.

The authors' repository discretises by the bilinear rule, learns an input weight B beside C, of
which only the product matters, and adds a skip to the shift, which is its first tap. These are left
out.

A whole sequence is a convolution with the filter that the states make; a step is the recurrence.
The state is h, N p D numbers, and the last N - 1 keys. The published state size of the recall
figure counts N D numbers and no keys.

Shape suffixes: B batch, T tokens, D model width, H heads, P numbers of a head (a second time Q), C
channels H P P, N complex states, J taps, R tokens of a tail.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from archsearch_kernels.long_conv import long_conv
from archsearch_kernels.precision import accumulator
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

SLOWEST, FASTEST = 1e-3, 1e-1
"""Step sizes at the start lie between these."""

SHIFT_NOISE = 0.1
"""Taps of the shift start within this of passing the previous key on."""


class H3(Mixer):
    """Linear and time-invariant memories between two products of tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        state_dim: Annotated[
            int, Choice(8, 16, 32, 64), "numbers each memory keeps, and taps of the shift; even"
        ] = 16
        head_dim: Annotated[int, Choice(1, 2), "size of a head; divides the width"] = 2

        def __post_init__(self) -> None:
            if self.state_dim < 2 or self.state_dim % 2:
                raise ValueError(f"state_dim is {self.state_dim}; it must be even, at least 2")
            if self.head_dim < 1 or self.d_model % self.head_dim:
                raise ValueError(
                    f"head_dim is {self.head_dim}; it must divide the width {self.d_model}"
                )

        @property
        def heads(self) -> int:
            return self.d_model // self.head_dim

        @property
        def memories(self) -> int:
            """Products that are remembered, over all heads."""
            return self.d_model * self.head_dim

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            memory = (self.heads, self.head_dim, self.head_dim, self.state_dim // 2, 2)
            return (
                StateTensor("memory", memory, accumulator(dtype)),
                StateTensor("tail", (self.state_dim - 1, self.d_model), dtype),
            )

        def zoology_state_elements(self, context_len: int) -> int:
            return self.d_model * self.state_dim

        def flops(self, context_len: int) -> int:
            projections = 8 * self.d_model**2
            shift = 2 * self.state_dim * self.d_model
            # A complex state: decay 6, input 1, output 4; a memory: product, skip 2, query 2.
            memories = self.memories * (11 * self.state_dim // 2 + 5)
            return projections + shift + memories + 8 * self.heads * self.state_dim

    config: Config
    kernels: ClassVar = {"long_conv": ("reference", "fft")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width, heads, states = config.d_model, config.heads, config.state_dim // 2
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=width**-0.5)
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.qkv.weight[width : 2 * width] = self.qkv.weight[:width]
        shift_JD = torch.empty(config.state_dim, width).uniform_(-SHIFT_NOISE, SHIFT_NOISE)
        shift_JD[1] += 1
        self.shift = nn.Parameter(shift_JD)
        self.log_dt = nn.Parameter(torch.empty(heads, 1))
        nn.init.uniform_(self.log_dt, math.log(SLOWEST), math.log(FASTEST))
        self.log_rate = nn.Parameter(torch.full((heads, states), math.log(0.5)))
        frequency_N = math.pi * torch.arange(states, dtype=torch.float32)
        self.frequency = nn.Parameter(frequency_N.repeat(heads, 1))
        scale_H1 = FASTEST / self.log_dt.detach().exp()
        self.C = nn.Parameter(torch.randn(heads, states, 2) * 0.5**0.5 * scale_H1[..., None])
        self.D = nn.Parameter(torch.randn(heads))

    def _exponents(self, compute: torch.dtype) -> tuple[Tensor, Tensor]:
        """dt A and c as complex numbers, (H, N)."""
        rate_HN, frequency_HN = self.log_rate.to(compute).exp(), self.frequency.to(compute)
        dt_H1, C_HN2 = self.log_dt.to(compute).exp(), self.C.to(compute)
        A_HN = torch.complex(-rate_HN, frequency_HN)
        C_HN = torch.complex(C_HN2[..., 0], C_HN2[..., 1])
        return dt_H1 * A_HN, 2 * C_HN * torch.expm1(dt_H1 * A_HN) / A_HN

    def _mix(
        self, x_BTD: Tensor, state: State | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output, the memory and the tail (None without a state)."""
        config, compute, T = self.config, accumulator(x_BTD.dtype), x_BTD.shape[1]
        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        shifted, tail = long_conv(
            k,
            self.shift,
            tail_BPC=None if state is None else state["tail"],
            keep_state=state is not None,
            backend=self.backends["long_conv"],
        )
        q, k, v = (
            part.to(compute).unflatten(-1, (config.heads, config.head_dim))
            for part in (q, shifted, v)
        )
        u_BTHPQ = k[..., None] * v[..., None, :]
        exponent_HN, weight_HN = self._exponents(compute)
        ages_J = torch.arange(T + 1, device=x_BTD.device, dtype=compute)
        powers_JHN = (ages_J[:, None, None] * exponent_HN).exp()
        filter_JH = (powers_JHN[:T] * weight_HN).sum(-1).real
        y_BTC, _ = long_conv(
            u_BTHPQ.flatten(2),
            filter_JH.repeat_interleave(config.head_dim**2, dim=1),
            keep_state=False,
            backend=self.backends["long_conv"],
        )
        y_BTHPQ = y_BTC.view_as(u_BTHPQ) + self.D.to(compute)[:, None, None] * u_BTHPQ
        memory = None
        if state is not None:
            y_BTHPQ = y_BTHPQ + _read(state["memory"], powers_JHN[1:] * weight_HN)
            memory = _advance(state["memory"], powers_JHN, u_BTHPQ)
        read_BTHQ = (q[..., None] * y_BTHPQ).sum(-2)
        return self.out(read_BTHQ.flatten(2).to(x_BTD.dtype)), memory, tail

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, memory, tail = self._mix(x_BTD, state)
        assert memory is not None and tail is not None
        return y_BTD, {"memory": memory, "tail": tail}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state


def _read(memory_BHPQN2: Tensor, weight_THN: Tensor) -> Tensor:
    """Real part of the memory's weighted sum, for the weights of every token."""
    real, imaginary = memory_BHPQN2.unbind(-1)
    pattern = "thn,bhpqn->bthpq"
    return torch.einsum(pattern, weight_THN.real, real) - torch.einsum(
        pattern, weight_THN.imag, imaginary
    )


def _advance(memory_BHPQN2: Tensor, powers_JHN: Tensor, u_BTHPQ: Tensor) -> Tensor:
    """The memory after T more inputs: what is left of it, and of each of them."""
    real, imaginary = memory_BHPQN2.unbind(-1)
    left_HN = powers_JHN[-1][:, None, None]  # beside the two dimensions of a head
    parts = (
        left_HN.real * real - left_HN.imag * imaginary,
        left_HN.real * imaginary + left_HN.imag * real,
    )
    remaining_THN = powers_JHN[:-1].flip(0)  # of the last input, all
    added = (
        torch.einsum("thn,bthpq->bhpqn", part, u_BTHPQ)
        for part in (remaining_THN.real, remaining_THN.imag)
    )
    return torch.stack([old + new for old, new in zip(parts, added, strict=True)], dim=-1)
