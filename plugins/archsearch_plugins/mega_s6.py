"""Mega-S6: gated attention inside chunks on top of a selective state space (compared in
arXiv:2406.07522).

Mega (arXiv:2209.10655) computes queries and keys from a moving average, so that attention may stay
inside chunks. Its comparator in the Samba study has the state space of Mamba in place of the
average:

    m_t = SiLU(S6(x)_t)                                     (with its short convolution and SiLU)
    v_t = SiLU(W_v x_t + b_v)
    u_t, z_t, r_t, g_t = W m_t + b    u = sigmoid(u), z = SiLU(z), r = SiLU(r)
    q_t = gamma_1 * z_t + beta_1      k_t = gamma_2 * z_t + beta_2
    o_t = sum_j softmax_j(q_t . k_j / sqrt(Z) + bias_{t-j}) v_j
    out_t = u_t * (SiLU(g_t + W_o (r_t * o_t)) - x_t)

where j runs over the tokens of t's own chunk of `chunk` tokens up to t, Z = `z_dim`, and the bias
is the product of two learned vectors rotated to positions t and j. There is one head. S6 is that of
the mixer `mamba` without an expansion, with step sizes of rank D / 32.

The authors add x before a norm of the mixer's own and mix it with the result by u. Here the model
adds the residual and norms before the mixer, so x above is the normed input. Left out are padding
masks and their code's refusal of lengths that are no multiple of the chunk: the last chunk is as
long as it is.

The state is that of S6, and a ring of keys and values as long as a chunk or the context, whichever
is shorter. At a chunk's first token the ring still holds the one before, which no token sees.

Projections start as N(0, 1 / inputs), the bias of r at 1, gamma at 1 and beta at 0 with a noise of
0.02, and S6 as in `mamba`. Published are N(0, 0.02^2) for all of these. On the recipe `tiny` at
1e-2 (width 32, 2 epochs), where a chunk holds the sequence, 6 of 8 seeds recall 0.96 to 1.0 of 4
pairs and two 0.2; with a bias of 0, where half of what is attended to starts turned round, 2 of 8
recall 1.0 and the others 0.2 and less. In chunks of 16 tokens it is 0.13 to 0.15 (4 seeds): across
chunks there is only S6, here without the pairing that `mamba` starts with.

Shape suffixes: B batch, T tokens, D model width, C channels (as many), N states, P tokens of the
convolution's tail, Z size of queries and keys, W slots of the ring, K blocks of S queries and L
keys.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from archsearch_kernels.precision import accumulator
from archsearch_kernels.rotary import rotate
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice, Range
from archsearch_plugins.mamba import S6, s6_flops

NOISE = 0.02
"""Standard deviation of gamma, beta and the vectors of the bias around their start."""


GATE_BIAS = 1.0
"""Bias of r before its SiLU: what is attended to starts through a gate that is mostly open."""


class MegaS6(Mixer):
    """Attention within a chunk, and a state across chunks."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        chunk: Annotated[
            int, Range(16, 2048, scale="log2"), "tokens of a chunk, which see each other"
        ] = 64
        z_dim: Annotated[int, Choice(16, 32, 64, 128), "size of queries and keys; even"] = 32
        state_dim: Annotated[int, Choice(8, 16, 32), "states of each channel"] = 16
        conv: Annotated[int, Choice(2, 3, 4), "taps of the convolution before the states"] = 4

        def __post_init__(self) -> None:
            for name in ("chunk", "state_dim"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if self.z_dim < 2 or self.z_dim % 2:
                raise ValueError(f"z_dim is {self.z_dim}; it must be even, at least 2")
            if self.conv < 2:
                raise ValueError(f"conv is {self.conv}; it must be at least 2")

        @property
        def rank(self) -> int:
            """Numbers that the step sizes of all channels are made of."""
            return math.ceil(self.d_model / 32)

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            ring = min(self.chunk, context_len)
            return (
                StateTensor("memory", (self.d_model, self.state_dim), accumulator(dtype)),
                StateTensor("tail", (self.conv - 1, self.d_model), dtype),
                StateTensor("key", (ring, self.z_dim), dtype),
                StateTensor("value", (ring, self.d_model), dtype),
                StateTensor("position", (), torch.int64),
            )

        def flops(self, context_len: int) -> int:
            width, size = self.d_model, self.z_dim
            full = min(self.chunk, context_len)
            slots = full * (full + 1) // 2 + (context_len - full) * full  # over the whole context
            # A step reads its whole ring; each slot: a score, its rotated bias, a value.
            attention = (4 * size + 2 * width + 4) * slots / max(context_len, 1)
            projections = 2 * width * (5 * width + size) + 4 * size + 8 * width
            inner = s6_flops(width, self.state_dim, self.conv, self.rank)
            return round(projections + attention + inner)

    config: Config
    kernels: ClassVar = {
        "selective_scan": ("reference", "associative"),
        "short_conv": ("reference", "triton"),
    }
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width, size = config.d_model, config.z_dim
        self.s6 = S6(width, config.state_dim, config.conv, config.rank, "none")
        self.value = nn.Linear(width, width)
        self.base = nn.Linear(width, 3 * width + size)
        self.out = nn.Linear(width, width)
        for linear in (self.value, self.base, self.out):
            nn.init.normal_(linear.weight, std=width**-0.5)
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.base.bias[width + size : -width] = GATE_BIAS
        self.gamma = nn.Parameter(1 + NOISE * torch.randn(2, size))
        self.beta = nn.Parameter(NOISE * torch.randn(2, size))
        self.bias = nn.Parameter(NOISE * torch.randn(2, size))

    def _project(
        self, x_BTD: Tensor, state: State | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor]:
        """Return u, r, g, q, k and v; the memory; the tail."""
        memory, tail = (None, None) if state is None else (state["memory"], state["tail"])
        s6_BTD, memory, tail = self.s6(x_BTD, memory, tail, self.backends, state is not None)
        width, size = self.config.d_model, self.config.z_dim
        u, z, r, g = self.base(F.silu(s6_BTD)).split((width, size, width, width), dim=-1)
        q, k = (F.silu(z)[..., None, :] * self.gamma + self.beta).unbind(-2)
        return (u.sigmoid(), F.silu(r), g, q, k, F.silu(self.value(x_BTD))), memory, tail

    def _finish(self, x_BTD: Tensor, u: Tensor, r: Tensor, g: Tensor, o_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = u * (F.silu(g + self.out(r * o_BTD)) - x_BTD)
        return y_BTD

    def _bias(self, ages: int, compute: torch.dtype) -> Tensor:
        """What is added to a score, by how many tokens the key is older: (ages,)."""
        query_Z, key_Z = self.bias.to(compute).unbind()
        age = torch.arange(ages, device=self.bias.device)
        rotated = rotate(query_Z.expand(1, ages, 1, -1), age)
        return (rotated * key_Z).sum(-1).flatten()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, start_B1: Tensor, older: int) -> Tensor:
        """Attention of T queries from position `start_B1` on to `older` + T keys and values.

        In blocks of S queries, each with the `older` keys before it: work grows with T alone.
        """
        T, compute = q.shape[1], accumulator(q.dtype)
        size = min(self.config.chunk, T)
        padding = (0, 0, 0, -T % size)
        q_BKSZ = F.pad(q.to(compute), padding).unflatten(1, (-1, size))
        k_BKZL, v_BKDL = (
            F.pad(x.to(compute), padding).unfold(1, older + size, size) for x in (k, v)
        )
        index_T = torch.arange(q_BKSZ.shape[1] * size, device=q.device)
        seen_BKS1 = ((start_B1 + index_T) % self.config.chunk).unflatten(1, (-1, size))[..., None]
        age_SL = index_T[:size, None] + older - torch.arange(older + size, device=q.device)
        oldest = min(self.config.chunk, older + size) - 1
        bias_SL = self._bias(oldest + 1, compute)[age_SL.clamp(0, oldest)]
        score_BKSL = q_BKSZ @ k_BKZL * self.config.z_dim**-0.5 + bias_SL
        hidden = (age_SL < 0) | (age_SL > seen_BKS1)
        weight_BKSL = score_BKSL.masked_fill(hidden, -torch.inf).softmax(-1)
        o_BTD: Tensor = (weight_BKSL @ v_BKDL.mT).flatten(1, 2)[:, :T]
        return o_BTD.to(q.dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        (u, r, g, q, k, v), _, _ = self._project(x_BTD, None)
        start_11 = torch.zeros(1, 1, dtype=torch.int64, device=x_BTD.device)
        return self._finish(x_BTD, u, r, g, self._attend(q, k, v, start_11, 0))

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        T, ring = x_BTD.shape[1], state["key"].shape[1]
        (u, r, g, q, k, v), memory, tail = self._project(x_BTD, state)
        assert memory is not None
        start_B1 = state["position"][:, None]
        past_BW1 = ((start_B1 + torch.arange(ring, device=x_BTD.device)) % ring)[..., None]
        keys, values = (  # in order of time
            torch.cat((old.gather(1, past_BW1.expand_as(old)), new), dim=1)
            for old, new in ((state["key"], k), (state["value"], v))
        )
        y_BTD = self._finish(x_BTD, u, r, g, self._attend(q, keys, values, start_B1, ring))
        kept = min(T, ring)  # older tokens of the segment would be overwritten anyway
        index = (start_B1 + torch.arange(T - kept, T, device=x_BTD.device)) % ring
        new_state = {"memory": memory, "tail": tail, "position": state["position"] + T}
        for name, new in (("key", k), ("value", v)):
            slot = index[..., None].expand(-1, -1, new.shape[2])
            new_state[name] = state[name].scatter(1, slot, new[:, T - kept :])
        return y_BTD, new_state

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        compute, ring = accumulator(x_BD.dtype), state["key"].shape[1]
        (u, r, g, q, k, v), memory, tail = self._project(x_BD[:, None], state)
        assert memory is not None
        position_B1 = state["position"][:, None]
        slot = (position_B1 % ring)[..., None]
        state["key"].scatter_(1, slot.expand_as(k), k)
        state["value"].scatter_(1, slot.expand_as(v), v)
        # A chunk starts at slot 0: the first token of a chunk, or a context shorter than one.
        seen_B1 = position_B1 % self.config.chunk
        age_BW = seen_B1 - torch.arange(ring, device=x_BD.device)
        score_BW = (q.to(compute) @ state["key"].to(compute).mT).squeeze(1)
        bias_BW = self._bias(ring, compute)[age_BW.clamp(min=0)]
        score_BW = score_BW * self.config.z_dim**-0.5 + bias_BW
        weight_BW = score_BW.masked_fill(age_BW < 0, -torch.inf).softmax(-1)
        o_B1D = weight_BW[:, None] @ state["value"].to(compute)
        state["memory"].copy_(memory)
        state["tail"].copy_(tail)
        state["position"].add_(1)
        return self._finish(x_BD[:, None], u, r, g, o_B1D.to(x_BD.dtype)).squeeze(1), state
