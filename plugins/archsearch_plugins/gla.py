"""Gated linear attention (GLA): each key channel forgets as the token says (arXiv:2312.06635).

`heads` memories share K' = `key_ratio` D keys and V' = `expand_v` D values, so that each is K x V
numbers with K = K' / `heads` and V = V' / `heads`. With `conv` taps (0: none), queries, keys and
values first pass a short convolution and SiLU; published is 0. The memory S forgets row by row:

    a_t = sigmoid(W_up W_down x_t + b)^(1 / tau)        (K numbers for each head)
    S_t = diag(a_t) S_{t-1} + k_t v_t^T
    y_t = W_out (norm(S_t^T q_t) * SiLU(W_g x_t))

W_down x is `gate_rank` numbers, tau is `gate_temperature`; the norm scales each head to root mean
square 1, times learned weights. `gate` says what forgets: `channel` is the above; `scalar` has one
a_t for a head, from a projection of its own; `fixed` has the rates of retention
(arXiv:2307.08621), a = 1 - 2^(-5 - h) for head h = 0, 1, ... whatever the token; `none` forgets
nothing.

The state is S, and with `conv` the last inputs of the convolution.

Projections start as N(0, 1 / inputs), b at 4 and taps within 0.1 of passing on one token. So half
is forgotten in some 600 tokens; with the published b = 0 it is 16. Of ours is a pairing: with
`conv`, keys start with the weights of queries and their taps one token late, so that a value is
written under its predecessor, and the same token brings it back. On the recipe `tiny` at 1e-2
(width 32, 2 epochs) 4 pairs are recalled at 1.00 (8 seeds), without the pairing at 0.69 to 0.82 (6
seeds). Without a convolution, the layer before has to learn to bring neighbours together: 0.06 to
0.57, 0.27 on average (16 seeds), and 0.17 with b = 0.

Left out is the published scale of queries, K^-1/2, which the norm undoes, and the bias of the
output gate's projection.

Shape suffixes: B batch, T tokens, D model width, H heads, K key size, V value size, R decays of a
head (K or 1), C channels of the convolution or of all values, J taps, P = J - 1 tokens carried in.
"""

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

GATES = ("channel", "scalar", "fixed", "none")

DECAY_BIAS = 4.0
"""Logit of the decays at the start: with a temperature of 16, half is forgotten in 600 tokens."""

FASTEST_DECAY = -5
"""Log2 of what the first head forgets a token under `fixed`; each further one half of that."""

CONV_NOISE = 0.1
"""Taps start within this of passing one token on; random taps mix keys with neighbours."""


class GatedLinear(Mixer):
    """A matrix memory per head whose rows forget as the token says."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        gate: Annotated[
            str, Choice(*GATES), "what forgets: each channel, each head, at fixed rates, or nothing"
        ] = "channel"
        heads: Annotated[int, Choice(1, 2, 4), "independent memories"] = 2
        key_ratio: Annotated[float, Choice(0.5, 1.0), "keys of all heads over the width"] = 0.5
        expand_v: Annotated[int, Choice(1, 2), "values of all heads over the width"] = 1
        conv: Annotated[int, Choice(0, 4), "taps of the convolution on q, k and v; 0: none"] = 4
        gate_rank: Annotated[int, "numbers that the decays of all channels are made of"] = 16
        gate_temperature: Annotated[int, "log decays are divided by this"] = 16

        def __post_init__(self) -> None:
            for name in ("expand_v", "gate_rank", "gate_temperature"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if self.gate not in GATES:
                raise ValueError(f"gate is '{self.gate}'; it must be one of: {', '.join(GATES)}")
            if self.conv < 0 or self.conv == 1:
                raise ValueError(f"conv is {self.conv}; it must be 0 or at least 2")
            keys = self.key_ratio * self.d_model
            if keys < 1 or keys != int(keys):
                raise ValueError(
                    f"key_ratio is {self.key_ratio:g}; times the width {self.d_model} it gives "
                    f"{keys:g} keys, which must be a whole number"
                )
            if self.heads < 1 or self.keys % self.heads or self.values % self.heads:
                raise ValueError(
                    f"heads is {self.heads}; it must divide the {self.keys} keys and "
                    f"{self.values} values"
                )

        def canonical(self) -> Self:
            usual = type(self)
            learned = self.gate in ("channel", "scalar")
            return replace(
                self,
                gate_rank=self.gate_rank if self.gate == "channel" else usual.gate_rank,
                gate_temperature=self.gate_temperature if learned else usual.gate_temperature,
            )

        @property
        def keys(self) -> int:
            """Keys of all heads."""
            return int(self.key_ratio * self.d_model)

        @property
        def values(self) -> int:
            """Values of all heads."""
            return self.expand_v * self.d_model

        @property
        def channels(self) -> int:
            """Channels of the convolution: queries, keys and values of all heads."""
            return 2 * self.keys + self.values

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            shape = (self.heads, self.keys // self.heads, self.values // self.heads)
            memory = StateTensor("memory", shape, accumulator(dtype))
            tail = StateTensor("tail", (self.conv - 1, self.channels), dtype)
            return (memory, tail) if self.conv else (memory,)

        def zoology_state_elements(self, context_len: int) -> int:
            # It counts as many tokens of the convolution as there are taps.
            return self.keys * self.values // self.heads + self.conv * self.channels

        def flops(self, context_len: int) -> int:
            projections = 2 * self.d_model * (self.channels + 2 * self.values)
            gate = {
                "channel": (2 * self.gate_rank * (self.d_model + self.keys)) + 4 * self.keys,
                "scalar": 2 * self.d_model * self.heads + 4 * self.heads,
            }.get(self.gate, 0)
            taps = 2 * self.conv * self.channels
            memory = self.keys * self.values // self.heads
            # Memory: decay 1, write 2, read 2. Values: norm 4, SiLU and gate 5.
            return projections + gate + taps + 5 * memory + 9 * self.values

    config: Config
    kernels: ClassVar = {
        "gated_linear": ("reference", "parallel", "chunked"),
        "short_conv": ("reference", "triton"),
    }
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.qkv = nn.Linear(config.d_model, config.channels, bias=False)
        self.gate = nn.Linear(config.d_model, config.values, bias=False)
        self.out = nn.Linear(config.values, config.d_model, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(config.values // config.heads))
        linears = [self.qkv, self.gate, self.out]
        if config.gate == "channel":
            self.decay_down = nn.Linear(config.d_model, config.gate_rank, bias=False)
            self.decay_up = nn.Linear(config.gate_rank, config.keys)
            linears += [self.decay_down, self.decay_up]
            nn.init.constant_(self.decay_up.bias, DECAY_BIAS)
        elif config.gate == "scalar":
            self.decay = nn.Linear(config.d_model, config.heads)
            linears.append(self.decay)
            nn.init.constant_(self.decay.bias, DECAY_BIAS)
        for linear in linears:
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        if config.conv:
            self._start_in_pairs()

    def _start_in_pairs(self) -> None:
        """Make the taps; keys start as the queries of one token before."""
        config, keys = self.config, slice(self.config.keys, 2 * self.config.keys)
        weight_CJ = torch.empty(config.channels, config.conv).uniform_(-CONV_NOISE, CONV_NOISE)
        weight_CJ[:, -1] += 1
        weight_CJ[keys] = weight_CJ[keys].roll(-1, 1)
        self.conv_weight = nn.Parameter(weight_CJ)
        with torch.no_grad():
            self.qkv.weight[keys] = self.qkv.weight[: config.keys]

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
        q, k, v = (
            part.unflatten(-1, (config.heads, -1))
            for part in qkv_BTC.split((config.keys, config.keys, config.values), dim=-1)
        )
        y_BTHV, memory = gated_linear(
            q,
            k,
            v,
            self._log_decay(x_BTD),
            state_BHKV=None if state is None else state["memory"],
            keep_state=state is not None,
            backend=self.backends["gated_linear"],
        )
        y_BTC = rms_norm(y_BTHV, self.norm_weight).flatten(-2) * F.silu(self.gate(x_BTD))
        return self.out(y_BTC), memory, tail_BPC

    def _log_decay(self, x_BTD: Tensor) -> Tensor:
        """log(a), (B, T, H, R): R = K numbers of each head under `channel`, else one."""
        config, compute = self.config, accumulator(x_BTD.dtype)
        if config.gate == "channel":
            logit = self.decay_up(self.decay_down(x_BTD))
        elif config.gate == "scalar":
            logit = self.decay(x_BTD)
        else:
            head_H = torch.arange(config.heads, device=x_BTD.device, dtype=torch.float64)
            lost_H = torch.exp2(FASTEST_DECAY - head_H) * (config.gate == "fixed")
            return torch.log1p(-lost_H)[:, None].expand(*x_BTD.shape[:2], -1, 1)
        log_decay = F.logsigmoid(logit.to(compute)) / config.gate_temperature
        log_decay_BTHR: Tensor = log_decay.unflatten(-1, (config.heads, -1))
        return log_decay_BTHR

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
