"""RWKV-4's time mixing: decaying means weighted by exponentials of keys (arXiv:2305.13048).

What a token brings is mixed with the token before it, by shares m that are learned for each number:

    k_t = W_k (m_k x_t + (1 - m_k) x_{t-1})
    v_t = W_v (m_v x_t + (1 - m_v) x_{t-1})
    r_t = W_r (m_r x_t + (1 - m_r) x_{t-1})

Each of the D channels is a mean of its values so far, where a token counts exp(k) times, half as
much each ln 2 / w tokens, and the current one exp(u) times more or less:

    a_t = exp(-w) a_{t-1} + exp(k_t) v_t
    b_t = exp(-w) b_{t-1} + exp(k_t)
    y_t = W_o (sigmoid(r_t) * (a_{t-1} + exp(u + k_t) v_t) / (b_{t-1} + exp(u + k_t)))

The state is the last x, and a and b as a numerator, a denominator and the exponent that both are
to be multiplied with: keys may be of any size.

Projections start as N(0, 1 / inputs), u at 0, and channels forget half in 2 to 2000 tokens. Keys
are those of the token before (m_k = 0), values and gates of the token itself (m_v = m_r = 1), so
that a value is weighted by what it follows. On the recipe `tiny` at 1e-2 (width 32, 2 epochs, 4
seeds) this recalls 0.71 to 0.77; with all shares at 1/2 it was 0.25. The published start mixes both
tokens by shares, rates and u that differ over channels and by depth, which a mixer does not know.

Left out is the channel mixing, which is `rwkv_channel`; the published blocks alternate the two.

Shape suffixes: B batch, T tokens, D model width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from archsearch_kernels.precision import accumulator
from archsearch_kernels.wkv4 import wkv4
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor

SUMS = ("numerator", "denominator", "exponent")
"""Parts of the state of each channel's sums."""

SLOWEST, FASTEST = -8.0, -1.0
"""Logarithms of the smallest and the largest rate w at the start."""


class Rwkv4(Mixer):
    """A decaying, weighted mean of the past in each channel, behind a gate."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            sums = (StateTensor(name, (self.d_model,), accumulator(dtype)) for name in SUMS)
            return (StateTensor("last", (self.d_model,), dtype), *sums)

        def flops(self, context_len: int) -> int:
            # Three shares; two sums of two terms with two exponentials each, quotient, gate.
            return 8 * self.d_model**2 + (9 + 24) * self.d_model

    config: Config
    kernels: ClassVar = {"wkv4": ("reference", "associative")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        D = config.d_model
        self.key = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(D, D, bias=False)
        self.receptance = nn.Linear(D, D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.mix_key = nn.Parameter(torch.zeros(D))
        self.mix_value = nn.Parameter(torch.ones(D))
        self.mix_receptance = nn.Parameter(torch.ones(D))
        self.log_rate = nn.Parameter(torch.linspace(SLOWEST, FASTEST, D))
        self.bonus = nn.Parameter(torch.zeros(D))
        for linear in (self.key, self.value, self.receptance, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def _mix(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, dict[str, Tensor | None]]:
        first_B1D = torch.zeros_like(x_BTD[:, :1]) if state is None else state["last"][:, None]
        last_BTD = torch.cat((first_B1D, x_BTD[:, :-1]), dim=1)
        k_BTD = self.key(torch.lerp(last_BTD, x_BTD, self.mix_key))
        v_BTD = self.value(torch.lerp(last_BTD, x_BTD, self.mix_value))
        gate_BTD = self.receptance(torch.lerp(last_BTD, x_BTD, self.mix_receptance)).sigmoid()
        compute = accumulator(x_BTD.dtype)
        given = {} if state is None else {f"{name}_BC": state[name] for name in SUMS}
        y_BTD, *sums = wkv4(
            k_BTD,
            v_BTD,
            -self.log_rate.to(compute).exp(),
            self.bonus.to(compute),
            **given,
            keep_state=state is not None,
            backend=self.backends["wkv4"],
        )
        return self.out(gate_BTD * y_BTD), dict(zip(SUMS, sums, strict=True))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, sums = self._mix(x_BTD, state)
        kept = {name: x for name, x in sums.items() if x is not None}
        return y_BTD, {"last": x_BTD[:, -1].clone(), **kept}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state
