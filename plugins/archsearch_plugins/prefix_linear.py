"""Prefix linear attention: the start of a text is read twice, once as a whole (arXiv:2407.05483).

Just read twice adds to BASED's linear attention with the Taylor map phi a second set of keys e and
values u over the first M = `prefix_len` tokens. Every token sees all of these, tokens of the prefix
too. Both sums cover the prefix, and one denominator divides both:

    S_i = sum_{m <= M} phi(e_m) u_m^T + sum_{j <= i} phi(k_j) v_j^T
    z_i = sum_{m <= M} phi(e_m) + sum_{j <= i} phi(k_j)
    y_i = phi(q_i)^T S_i / (phi(q_i) . z_i + 1e-6)

The sums over the prefix are a state to begin with. So decoding goes on from one memory and one
normaliser, those of `linear_attention`; a step neither makes nor needs the second keys. A prompt of
fewer than M tokens is all prefix. Whether a sequence has begun stands in the normaliser, whose
first number counts tokens; a sequence begun by `step` has no prefix. `flops` counts the second keys
in the prefix's share of the context.

Prompts of one batch may be padded on the left: `mix` and `forward` take `exists_BT`, False at
padding. A padded token leaves nothing in any sum, so that outputs and state are those of the prompt
alone; the prefix is the first M tokens that exist. The authors' code sets the keys of padding to 0
before the map. But phi(0) has the constant 1, and so the values of padding leak into every output.

Projections start as N(0, 1 / inputs), and the second values u at 0, so that a model begins by
reading in order. On the recipe `tiny` at 1e-2 (width 32, default fields, 2 epochs, 6 seeds) it then
recalls 0.54 to 0.99; 0.14 to 0.84 if u starts like v, and 0.03 to 0.08 if all start as
N(0, 0.02^2), as `linear_attention` does. Left out are the training objective, which is no part of a
mixer, and the authors' separate `scale_dim`.

Shape suffixes: B batch, T tokens, P tokens that may be in the prefix, D model width, X numbers of
all heads, H heads, K feature dimension, V head size, F features.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from archsearch_kernels import taylor_linear_attention
from archsearch_kernels.linear_attention import feature_size, linear_attention, prefix_state
from archsearch_kernels.precision import accumulator
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice, Range


class PrefixLinear(Mixer):
    """A fixed-size memory that holds the start of a text as a whole before it is read in order."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        feature_map: Annotated[
            str, "map from queries and keys to features: taylor, or taylor_full for a larger state"
        ] = "taylor"
        feature_dim: Annotated[
            int, Range(4, 64, step=4), "size of queries and keys of one head, before the map"
        ] = 16
        heads: Annotated[int, Choice(1, 2, 4), "heads; divides the width"] = 1
        prefix_len: Annotated[
            int, Choice(16, 64, 256, 1024), "tokens at the start that are read as a whole"
        ] = 64

        def __post_init__(self) -> None:
            if self.heads < 1 or self.d_model % self.heads:
                raise ValueError(f"heads is {self.heads}; it must divide the width {self.d_model}")
            for name in ("feature_dim", "prefix_len"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if self.feature_map not in ("taylor", "taylor_full"):
                raise ValueError(
                    f"feature_map is {self.feature_map}; it must be taylor or taylor_full"
                )

        @property
        def features(self) -> int:
            """Features per head."""
            return feature_size(self.feature_map, self.feature_dim)

        @property
        def head_size(self) -> int:
            return self.d_model // self.heads

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            memory = (self.heads, self.features, self.head_size)
            return (
                StateTensor("memory", memory, accumulator(dtype)),
                StateTensor("normaliser", memory[:2], accumulator(dtype)),
            )

        def zoology_state_elements(self, context_len: int) -> int:
            compact = feature_size("taylor", self.feature_dim)  # whatever it computes with
            return self.heads * compact * (self.head_size + 1)

        def flops(self, context_len: int) -> int:
            keys = 2 * self.d_model * self.heads * self.feature_dim
            values = 2 * self.d_model**2
            write = 2 * self.heads * self.features * (self.head_size + 1)
            feature_map = 2 * self.heads * self.features
            causal = 2 * (keys + values + write + feature_map)  # queries as keys, out as values
            prefix = keys + values + write + feature_map
            return causal + round(prefix * min(self.prefix_len, context_len) / context_len)

        def can_use(self, family: str, backend: str) -> bool:
            return backend != "triton" or (
                self.feature_map == "taylor"
                and taylor_linear_attention.takes(self.feature_dim, self.head_size)
            )

    config: Config
    kernels: ClassVar = {"linear_attention": ("reference", "quadratic", "chunked", "triton")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        inner = config.heads * config.feature_dim
        self.qk = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.value = nn.Linear(config.d_model, config.d_model, bias=False)
        self.prefix_key = nn.Linear(config.d_model, inner, bias=False)
        self.prefix_value = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        for linear in (self.qk, self.value, self.prefix_key, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.prefix_value.weight)

    def _heads(self, x_BTX: Tensor) -> Tensor:
        x_BTHX: Tensor = x_BTX.unflatten(-1, (self.config.heads, -1))
        return x_BTHX

    def _read_prefix(self, x_BTD: Tensor, exists_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """The memory and normaliser that the prefix of a sequence leaves which begins here."""
        x_BPD, in_prefix_BP = x_BTD[:, : self.config.prefix_len], None
        if exists_BT is not None:
            x_BPD = x_BTD
            in_prefix_BP = exists_BT & (exists_BT.cumsum(1) <= self.config.prefix_len)
        return prefix_state(
            self._heads(self.prefix_key(x_BPD)),
            self._heads(self.prefix_value(x_BPD)),
            feature_map=self.config.feature_map,
            exists_BT=in_prefix_BP,
            backend=self.backends["linear_attention"],
        )

    def _read(
        self,
        x_BTD: Tensor,
        memory: Tensor,
        normaliser: Tensor,
        exists_BT: Tensor | None = None,
        keep_state: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Go on from a state, token after token."""
        q, k = self.qk(x_BTD).unflatten(-1, (2, self.config.heads, -1)).unbind(2)
        y_BTHV, new_memory, new_normaliser = linear_attention(
            q,
            k,
            self._heads(self.value(x_BTD)),
            feature_map=self.config.feature_map,
            exists_BT=exists_BT,
            memory_BHFV=memory,
            normaliser_BHF=normaliser,
            keep_state=keep_state,
            backend=self.backends["linear_attention"],
        )
        return self.out(y_BTHV.flatten(-2)), new_memory, new_normaliser

    def forward(self, x_BTD: Tensor, exists_BT: Tensor | None = None) -> Tensor:
        """Mix a whole sequence; `exists_BT` is False at padding on the left."""
        memory, normaliser = self._read_prefix(x_BTD, exists_BT)
        return self._read(x_BTD, memory, normaliser, exists_BT, keep_state=False)[0]

    def mix(
        self, x_BTD: Tensor, state: State, exists_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Mix a segment, the first one with its prefix; `exists_BT` is False at padding."""
        memory, normaliser = self._read_prefix(x_BTD, exists_BT)
        # phi begins with the constant 1: the first number of the normaliser counts tokens.
        begins_B = state["normaliser"][:, 0, 0] == 0
        memory = torch.where(begins_B[:, None, None, None], memory, state["memory"])
        normaliser = torch.where(begins_B[:, None, None], normaliser, state["normaliser"])
        y_BTD, new_memory, new_normaliser = self._read(x_BTD, memory, normaliser, exists_BT)
        assert new_memory is not None and new_normaliser is not None
        return y_BTD, {"memory": new_memory, "normaliser": new_normaliser}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        backend = self.backends["linear_attention"]
        if backend == "triton":
            q, k = self.qk(x_BD).unflatten(-1, (2, self.config.heads, -1)).unbind(1)
            y_BHV = taylor_linear_attention.step(
                q,
                k,
                self._heads(self.value(x_BD)),
                state["memory"],
                state["normaliser"],
                backend=backend,
            )
            return self.out(y_BHV.flatten(-2)), state
        y_B1D, memory, normaliser = self._read(x_BD[:, None], state["memory"], state["normaliser"])
        assert memory is not None and normaliser is not None
        state["memory"].copy_(memory)
        state["normaliser"].copy_(normaliser)
        return y_B1D.squeeze(1), state
