"""Causal softmax attention with grouped keys and values (arXiv:1706.03762, arXiv:2305.13245).

Each of H heads has queries of K = D / H numbers, and reads one of the G key-value heads:

    y_i = sum_{j <= i} softmax_j(q_i . k_j / sqrt(K)) v_j

`kv_heads` is G; 0 stands for one key-value head for each query head, 1 is multi-query attention.
`rope` rotates queries and keys by their position (arXiv:2104.09864), with angles position *
`rope_base`^(-2n/K); without it there is no position encoding. `qk_norm` scales every head's queries
and keys to root mean square 1, times a learned weight for each of the K numbers, before rotation
(after arXiv:2010.04245), which bounds the scores.

The state is a cache of keys (normed and rotated) and values with room for the whole context, and
how much of it is filled.

Projections start as N(0, 0.02^2), as in the published recall recipe; weights of norms at 1. Left
out are dropout on the weights, biases, and scaled rotary embeddings for longer contexts.

Shape suffixes: B batch, T tokens, L room of the cache, D model width, H query heads, G key-value
heads, K head size.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from archsearch_kernels.attention import attention
from archsearch_kernels.norm import rms_norm
from archsearch_kernels.rotary import BASE, rotate
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor, rows
from archsearch.space import Choice

INIT_STD = 0.02
"""Standard deviation of every projection, as in the published recall recipe."""


class Attention(Mixer):
    """Every token sees itself and all before it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        heads: Annotated[int, Choice(1, 2, 4, 8, 16), "query heads; divides the width"] = 1
        kv_heads: Annotated[
            int, Choice(0, 1, 2, 4, 8), "key-value heads shared by the query heads; 0: one for each"
        ] = 0
        rope: Annotated[bool, "rotate queries and keys by their position"] = False
        rope_base: Annotated[float, "base of the angles of `rope`"] = BASE
        qk_norm: Annotated[bool, "norm queries and keys, with learned weights"] = False

        def __post_init__(self) -> None:
            if self.heads < 1 or self.d_model % self.heads:
                raise ValueError(f"heads is {self.heads}; it must divide the width {self.d_model}")
            if self.kv_heads < 0 or self.heads % self.groups:
                raise ValueError(
                    f"kv_heads is {self.kv_heads}; it must divide heads, which is {self.heads}"
                )
            if self.rope and self.head_size % 2:
                raise ValueError(
                    f"rope needs an even head size; width {self.d_model} / {self.heads} heads "
                    f"gives {self.head_size}"
                )
            if self.rope_base < 1:
                raise ValueError(f"rope_base is {self.rope_base:g}; it must be at least 1")

        def canonical(self) -> Self:
            return replace(
                self,
                kv_heads=0 if self.kv_heads == self.heads else self.kv_heads,
                rope_base=self.rope_base if self.rope else BASE,
            )

        @property
        def groups(self) -> int:
            """Number of key-value heads."""
            return self.kv_heads or self.heads

        @property
        def head_size(self) -> int:
            return self.d_model // self.heads

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            cache = (context_len, self.groups, self.head_size)
            return (
                StateTensor("key", cache, dtype),
                StateTensor("value", cache, dtype),
                StateTensor("position", (), torch.int64),
            )

        def zoology_state_elements(self, context_len: int) -> int:
            return 2 * self.groups * self.head_size * context_len

        def flops(self, context_len: int) -> int:
            queries, keys = self.heads * self.head_size, self.groups * self.head_size
            projections = 2 * self.d_model * (2 * queries + 2 * keys)
            visible = (context_len + 1) / 2  # the mean over a context of how many keys are seen
            norms = 4 * (queries + keys) if self.qk_norm else 0  # square, sum, scale, weight
            return projections + norms + round(4 * queries * visible)

    config: Config
    kernels: ClassVar = {"attention": ("reference", "sdpa")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        queries, keys = config.heads * config.head_size, config.groups * config.head_size
        self.qkv = nn.Linear(config.d_model, queries + 2 * keys, bias=False)
        self.out = nn.Linear(queries, config.d_model, bias=False)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=INIT_STD)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(config.head_size))
            self.k_norm = nn.Parameter(torch.ones(config.head_size))

    def _project(self, x_BTD: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BTHK, k_BTGK, v_BTGK; positions are (T,) or (B, T)."""
        H, G = self.config.heads, self.config.groups
        q, k, v = self.qkv(x_BTD).unflatten(-1, (H + 2 * G, -1)).split((H, G, G), dim=-2)
        return self._placed(q, position, "q_norm"), self._placed(k, position, "k_norm"), v

    def _placed(self, x_BTHK: Tensor, position: Tensor, norm: str) -> Tensor:
        """Norm and rotate queries or keys, as far as they are to be."""
        if self.config.qk_norm:
            weight_K: Tensor = getattr(self, norm)  # in a population no nn.Parameter
            x_BTHK = rms_norm(x_BTHK, weight_K)
        return rotate(x_BTHK, position, self.config.rope_base) if self.config.rope else x_BTHK

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, at_BT: Tensor | None) -> Tensor:
        y_BTHK = attention(q, k, v, at_BT=at_BT, backend=self.backends["attention"])
        y_BTD: Tensor = self.out(y_BTHK.flatten(-2))
        return y_BTD

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self._project(x_BTD, torch.arange(x_BTD.shape[1], device=x_BTD.device))
        return self._attend(q, k, v, None)

    def outputs_at(self, x_BTD: Tensor, at_BK: Tensor) -> Tensor:
        H, G, size = self.config.heads, self.config.groups, self.config.head_size
        q_rows, kv_rows = self.qkv.weight.split((H * size, 2 * G * size))
        q = F.linear(rows(x_BTD, at_BK), q_rows).unflatten(-1, (H, -1))
        k, v = F.linear(x_BTD, kv_rows).unflatten(-1, (2 * G, -1)).split((G, G), dim=-2)
        position_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        q, k = self._placed(q, at_BK, "q_norm"), self._placed(k, position_T, "k_norm")
        return self._attend(q, k, v, at_BK)

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        start_B = state["position"]
        position_BT = start_B[:, None] + torch.arange(x_BTD.shape[1], device=x_BTD.device)
        q, k, v = self._project(x_BTD, position_BT)
        index = position_BT[..., None, None].expand_as(k)
        key, value = state["key"].scatter(1, index, k), state["value"].scatter(1, index, v)
        y_BTD = self._attend(q, key, value, position_BT)
        return y_BTD, {"key": key, "value": value, "position": start_B + x_BTD.shape[1]}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        position_B1 = state["position"][:, None]
        q, k, v = self._project(x_BD[:, None], position_B1)
        index = position_B1[..., None, None].expand_as(k)
        state["key"].scatter_(1, index, k)
        state["value"].scatter_(1, index, v)
        y_B1D = self._attend(q, state["key"], state["value"], position_B1)
        state["position"].add_(1)
        return y_B1D.squeeze(1), state
