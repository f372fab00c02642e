"""Retention, the mixer of RetNet: each head forgets at its own fixed rate (arXiv:2307.08621).

Each of H heads has queries and keys of K = D / H numbers and values of V = `expand_v` K. With
`rope`, queries and keys are rotated by their position (arXiv:2104.09864). The memory S forgets,
head h = 0, 1, ... half as fast as the one before it:

    g_h = 1 - 2^(-5 - h)
    S_t = g_h S_{t-1} + k_t v_t^T
    y_t = W_out (norm(S_t^T q_t) * SiLU(W_g x_t))

The norm scales each head to root mean square 1. The three published forms are three backends of
one kernel: parallel is `parallel`, recurrent is `reference`, chunkwise recurrent is `chunked`.

The state is S, and with `rope` the position.

Projections start as N(0, 1 / inputs); that of the gate 0.03 times as large, where SiLU is close to
linear. On the recipe `tiny` at 1e-2 (width 32, 2 epochs, 32 seeds) 4 pairs are recalled at 0.13 to
0.59, 0.35 on average; with a gate of full size it was 0.08 to 0.55, 0.30 on average, and with the
published start, uniform and 6 times as narrow, 0.09 to 0.43, 0.28 on average (16 seeds). Nothing
here brings neighbours together, so that the layer before has to learn to; neither the rotation, the
number of heads nor a higher rate changes that. After 3 epochs it is 0.37 to 0.78, 0.63 on average,
and after 4 it is 0.78 on average (8 seeds).

Left out are the published scale of keys, K^-1/2, and the stabilising divisors of the authors' code:
the norm undoes both. Angles are position * 10000^(-2n/K), as in other mixers here; that code spaces
them a little wider.

Shape suffixes: B batch, T tokens, D model width, H heads, K key size, V value size.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from archsearch_kernels.gated_linear import gated_linear
from archsearch_kernels.norm import rms_norm
from archsearch_kernels.precision import accumulator
from archsearch_kernels.rotary import rotate
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice

FASTEST_DECAY = -5
"""Log2 of what the first head forgets a token; each further head forgets half of the one before."""

GATE_SCALE = 0.03
"""Weights of the gate at the start, over those of the other projections."""


class Retention(Mixer):
    """A matrix memory per head that forgets at a rate of its own, whatever the tokens are."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        heads: Annotated[int, Choice(1, 2, 4, 8), "independent memories; divides the width"] = 2
        expand_v: Annotated[int, Choice(1, 2), "size of a value over the size of a key"] = 2
        rope: Annotated[bool, "rotate queries and keys by their position"] = True

        def __post_init__(self) -> None:
            if self.heads < 1 or self.d_model % self.heads:
                raise ValueError(f"heads is {self.heads}; it must divide the width {self.d_model}")
            if self.expand_v < 1:
                raise ValueError(f"expand_v is {self.expand_v}; it must be at least 1")
            if self.rope and self.key_size % 2:
                raise ValueError(
                    f"rope needs an even head size; width {self.d_model} / {self.heads} heads "
                    f"gives {self.key_size}"
                )

        @property
        def key_size(self) -> int:
            """Size of the queries and keys of one head."""
            return self.d_model // self.heads

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            shape = (self.heads, self.key_size, self.expand_v * self.key_size)
            memory = StateTensor("memory", shape, accumulator(dtype))
            return (memory, StateTensor("position", (), torch.int64)) if self.rope else (memory,)

        def flops(self, context_len: int) -> int:
            values = self.expand_v * self.d_model
            projections = 2 * self.d_model * (2 * self.d_model + 3 * values)
            rotation = 8 * self.d_model if self.rope else 0
            # Memory: decay 1, write 2, read 2. Values: norm 3, SiLU and gate 5.
            return projections + rotation + 5 * values * self.key_size + 8 * values

    config: Config
    kernels: ClassVar = {"gated_linear": ("reference", "parallel", "chunked")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width, values = config.d_model, config.expand_v * config.d_model
        self.qk = nn.Linear(width, 2 * width, bias=False)
        self.value = nn.Linear(width, values, bias=False)
        self.gate = nn.Linear(width, values, bias=False)
        self.out = nn.Linear(values, width, bias=False)
        for linear in (self.qk, self.value, self.gate, self.out):
            scale = GATE_SCALE if linear is self.gate else 1.0
            nn.init.normal_(linear.weight, std=scale * linear.in_features**-0.5)

    def _mix(
        self, x_BTD: Tensor, position: Tensor, memory_BHKV: Tensor | None, keep_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the memory if it is kept; positions are (T,) or (B, T)."""
        heads = self.config.heads
        q, k = self.qk(x_BTD).unflatten(-1, (2, heads, -1)).unbind(2)
        if self.config.rope:
            q, k = rotate(q, position), rotate(k, position)
        y_BTHV, memory_BHKV = gated_linear(
            q,
            k,
            self.value(x_BTD).unflatten(-1, (heads, -1)),
            self._log_decay(x_BTD),
            state_BHKV=memory_BHKV,
            keep_state=keep_state,
            backend=self.backends["gated_linear"],
        )
        return self.out(rms_norm(y_BTHV).flatten(-2) * F.silu(self.gate(x_BTD))), memory_BHKV

    def _log_decay(self, x_BTD: Tensor) -> Tensor:
        """log(g) of each head, the same for every token."""
        head_H = torch.arange(self.config.heads, device=x_BTD.device, dtype=torch.float64)
        log_decay_H = torch.log1p(-torch.exp2(FASTEST_DECAY - head_H))
        return log_decay_H[:, None].expand(*x_BTD.shape[:2], -1, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        position_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        return self._mix(x_BTD, position_T, None, keep_state=False)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        position = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        if self.config.rope:
            position = state["position"][:, None] + position
        y_BTD, memory = self._mix(x_BTD, position, state["memory"], keep_state=True)
        assert memory is not None
        kept = {"memory": memory}
        if self.config.rope:
            kept["position"] = state["position"] + x_BTD.shape[1]
        return y_BTD, kept

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state
