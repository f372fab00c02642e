"""RWKV-7 "Goose": a matrix memory that forgets and corrects by channel (arXiv:2503.14456).

Each of H = D / K heads has a memory S of K x K numbers, K = `head_dim`. What a token gives to each
of r, w, k, v, a and g is mixed with the token before it: x^r = x_t + m_r (x_{t-1} - x_t).
Maps through `rank` numbers are written f_w, f_a and f_g; the one of w has tanh inside.

    r_t = W_r x^r,  k'_t = W_k x^k,  v_t = W_v x^v
    log w_t = -exp(-1/2) sigmoid(d_0 + f_w(x^w))
    a_t = sigmoid(a_0 + f_a(x^a))
    n_t = unit(k'_t * k_k),  k_t = k'_t * (1 + (a_t - 1) * k_a)
    S_t = S_{t-1} (diag(w_t) - n_t (a_t * n_t)^T) + v_t k_t^T
    y_t = W_out (f_g(x^g) * (norm(S_t r_t) + (r_t . (u * k_t)) v_t))

So what the memory predicts along the key n is taken away at rates a, decays w lie between 0.545
and 1, and a token also reads its own value with bonus u. `unit` scales each head to length 1; the
norm sets the mean of each head to 0 and its variance to 1, then scales and shifts it by learned
numbers. f_g has a sigmoid inside.

The state is S, and the last token.

Projections and the down sides of f start as N(0, 1 / inputs), and so does the up side of f_g; those
of f_w and f_a start at a tenth of that, around a decay that forgets half in 700 tokens and a 0.88.
W_r starts as W_k, and keys are those of the token before (m_k = 1; the other shares are 0), so that
a token reads what followed its like; k_k and k_a start at 1, u at 0. On the recipe `tiny` at 1e-2
(width 32, 2 epochs) this recalls 1.0, and an unpaired start with a = 1/2 0.04 to 0.87 (4 seeds, of
which three are below 0.25). The published start spreads shares and decays over channels and differs
by depth, which a mixer does not know.

Left out is the value residual, which mixes the values of a layer with those of the first: layers
know nothing of each other here. The channel mixing of RWKV-7 is an MLP of its own.

Shape suffixes: B batch, T tokens, D model width, H heads, K size of a head, R rank, S = 6 shares.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from archsearch_kernels.norm import unit
from archsearch_kernels.precision import accumulator
from archsearch_kernels.wkv7 import wkv7
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

FASTEST_DECAY = math.exp(-0.5)
"""The largest -log(w)."""

INITIAL_RATE = 2.0
"""Bias of a before its sigmoid: what is stored under a key is mostly taken away."""

INITIAL_DECAY = 1e-3
"""-log(w) at the start: half is forgotten after 700 tokens."""

NORM_EPSILON = 1e-5
"""Added to the variance of a head, times the size of the head as published."""

SHARES = 6
"""Mixtures with the last token: for r, w, k, v, a and g."""


class LowRank(nn.Module):
    """A map through few numbers, with a function between its two matrices."""

    def __init__(self, width: int, rank: int, gain: float) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        nn.init.normal_(self.up.weight, std=gain * rank**-0.5)


class Rwkv7(Mixer):
    """A matrix memory per head whose channels forget and are corrected at rates of their own."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        head_dim: Annotated[int, Choice(16, 32, 64), "size of a head's keys and values"] = 16
        rank: Annotated[int, "numbers that decays, rates and gates of all channels are made of"] = (
            16
        )

        def __post_init__(self) -> None:
            if self.rank < 1:
                raise ValueError(f"rank is {self.rank}; it must be at least 1")
            if self.head_dim < 1 or self.d_model % self.head_dim:
                raise ValueError(
                    f"head_dim is {self.head_dim}; it must divide the width {self.d_model}"
                )

        @property
        def heads(self) -> int:
            """Independent memories."""
            return self.d_model // self.head_dim

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            shape = (self.heads, self.head_dim, self.head_dim)
            memory = StateTensor("memory", shape, accumulator(dtype))
            return (memory, StateTensor("last", (self.d_model,), dtype))

        def zoology_state_elements(self, context_len: int) -> int:
            return self.heads * self.head_dim**2  # without the last token

        def flops(self, context_len: int) -> int:
            weights = 4 * self.d_model**2 + 3 * 2 * self.d_model * self.rank
            memory = 9 * self.d_model * self.head_dim  # decay 1; look up, take away, write, read 2
            channels = (3 * SHARES + 20) * self.d_model  # mixtures; rates, norms, bonus and gate
            return 2 * weights + memory + channels

    config: Config
    kernels: ClassVar = {"wkv7": ("reference", "chunked")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        D = config.d_model
        self.shares = nn.Parameter(torch.zeros(SHARES, D))
        nn.init.ones_(self.shares[2])  # of k
        self.receptance, self.key, self.value, self.out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )
        for linear in (self.receptance, self.key, self.value, self.out):
            nn.init.normal_(linear.weight, std=D**-0.5)
        self.receptance.weight = nn.Parameter(self.key.weight.detach().clone())
        self.decay = LowRank(D, config.rank, 0.1)
        self.rate = LowRank(D, config.rank, 0.1)
        self.gate = LowRank(D, config.rank, 1.0)
        share = INITIAL_DECAY / FASTEST_DECAY
        self.decay_bias = nn.Parameter(torch.full((D,), math.log(share / (1 - share))))
        self.rate_bias = nn.Parameter(torch.full((D,), INITIAL_RATE))
        self.removal = nn.Parameter(torch.ones(D))  # k_k
        self.replacement = nn.Parameter(torch.ones(D))  # k_a
        self.bonus = nn.Parameter(torch.zeros(D))  # u
        self.norm_weight = nn.Parameter(torch.ones(D))
        self.norm_bias = nn.Parameter(torch.zeros(D))

    def _mix(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor | None]:
        """Return the output and the memory (None without a state)."""
        first_B1D = torch.zeros_like(x_BTD[:, :1]) if state is None else state["last"][:, None]
        step_BTD = torch.cat((first_B1D, x_BTD[:, :-1]), dim=1) - x_BTD
        of_r, of_w, of_k, of_v, of_a, of_g = (
            x_BTD + step_BTD * share_D for share_D in self.shares.unbind()
        )
        r_BTHK, value_BTHK = self._heads(self.receptance(of_r)), self._heads(self.value(of_v))
        key_BTD, rate_BTD = self.key(of_k), self._rate(of_a)
        removed_BTHK = unit(self._heads(key_BTD * self.removal))
        k_BTHK = self._heads(key_BTD * (1 + (rate_BTD - 1) * self.replacement))
        y_BTHK, memory = wkv7(
            r_BTHK,
            k_BTHK,
            value_BTHK,
            self._heads(self._log_decay(of_w)),
            -removed_BTHK,
            removed_BTHK * self._heads(rate_BTD),
            state_BHVK=None if state is None else state["memory"],
            keep_state=state is not None,
            backend=self.backends["wkv7"],
        )
        K = self.config.head_dim
        normed_BTHK = F.layer_norm(y_BTHK, (K,), eps=K * NORM_EPSILON)
        y_BTD = normed_BTHK.flatten(-2) * self.norm_weight + self.norm_bias
        own_BTH1 = (r_BTHK * k_BTHK * self._heads(self.bonus)).sum(-1, keepdim=True)
        y_BTD = y_BTD + (own_BTH1 * value_BTHK).flatten(-2)
        gate_BTD = self.gate.up(self.gate.down(of_g).sigmoid())
        return self.out(y_BTD * gate_BTD), memory

    def _log_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log(w) per channel, in fp32 at least."""
        speed_BTD = self.decay.up(self.decay.down(x_BTD).tanh())
        compute = accumulator(speed_BTD.dtype)
        share_BTD: Tensor = (speed_BTD.to(compute) + self.decay_bias.to(compute)).sigmoid()
        return -FASTEST_DECAY * share_BTD

    def _rate(self, x_BTD: Tensor) -> Tensor:
        """Return how much of what is stored under the key is taken away, per channel."""
        rate_BTD: Tensor = self.rate.up(self.rate.down(x_BTD)) + self.rate_bias
        return rate_BTD.sigmoid()

    def _heads(self, x_D: Tensor) -> Tensor:
        x_HK: Tensor = x_D.unflatten(-1, (self.config.heads, self.config.head_dim))
        return x_HK

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, memory = self._mix(x_BTD, state)
        assert memory is not None
        return y_BTD, {"memory": memory, "last": x_BTD[:, -1].clone()}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state
