"""Linear attention with the second-order Taylor map of BASED, or another map (arXiv:2402.18668).

Queries and keys of f = `feature_dim` numbers a head are turned into F features by a map phi, and a
memory S adds up what tokens hold under their features, with a normaliser z of the features alone:

    S_i = g S_{i-1} + phi(k_i) v_i^T
    z_i = z_{i-1} + phi(k_i)
    y_i = (w_h . x_i + b_h) phi(q_i)^T S_i / (phi(q_i) . z_i + 1e-6)

`feature_map` is one of

    taylor       phi(q).phi(k) = 1 + t + t^2/2 with t = q.k / sqrt(f); F = 1 + f + f(f+1)/2
    elu          1 + ELU(x), F = f (arXiv:2006.16236); also named `pos_elu`, as in Zoology
    relu         max(x, 0), F = f (arXiv:2103.13076)
    performer    positive random features of exp(q.k / sqrt(f)), F = `random_features`
                 (FAVOR+, arXiv:2009.14794)
    cosformer    max(x, 0) times cosine and sine of the position, F = 2 f (arXiv:2202.08791)

`compact` false keeps the Taylor map in 1 + f + f^2 features, 273 instead of 153 at f = 16: what the
authors' code computes with, the same function from a larger state. `normalise` false leaves z and
the denominator out.

`fixed_decay` gives head h = 0, 1, ... the decay g = 1 - 2^(-3 - h), as the published 1.3B model of
10B tokens has (`fixed_decay` with `decay_const` -3 there): it forgets in S and not in z. Otherwise
g = 1. `head_mix` scales each head by a number that the token chooses, w_h . x_i + b_h: the authors'
projection beside the decay. Otherwise it is 1.

The random features are drawn once, orthogonal in blocks, as a buffer: each member of a population
has its own. Zoology draws shorter rows, of length sqrt(f / F), which make another kernel than
softmax's. A `cosformer` tells `max_len` positions apart, later ones count as the last, and its
state counts tokens. Zoology divides by the length of the input at hand instead, so that an output
changes when text is added behind it. The other maps use no positions, and nothing normalises
queries or keys.

Projections start as N(0, 0.02^2) under every map, as in the published recall recipe, and `head_mix`
at 1 for every head. On the recipe `tiny` at 1e-2 (width 32, 2 epochs, 2 seeds) `taylor` recalls
0.86 and 0.98, `cosformer` 0.75 and 0.83, `relu` 0.68 and 0.76, `elu` 0.35 and 0.39. `performer` is
slow: 0.17 and 0.19, and 0.22 and 0.77 at 3e-2.

Shape suffixes: B batch, T tokens, D model width, H heads, K feature dimension, V head size, F
features, P random features.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from archsearch_kernels import taylor_linear_attention
from archsearch_kernels.linear_attention import feature_size, linear_attention
from archsearch_kernels.linear_attention.feature_maps import orthogonal_projection
from archsearch_kernels.precision import accumulator
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor, rows
from archsearch.space import Choice, Range

INIT_STD = 0.02
"""Standard deviation of every projection, as in the published recall recipe."""

FASTEST_DECAY = -3
"""Log2 of what the first head forgets a token; each further head forgets half of the one before."""


class LinearAttention(Mixer):
    """A fixed-size associative memory of all tokens, read through a kernel."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        feature_map: Annotated[
            str,
            Choice("taylor", "elu", "relu", "performer", "cosformer", aliases={"pos_elu": "elu"}),
            "map from queries and keys to features",
        ] = "taylor"
        feature_dim: Annotated[
            int, Range(4, 64, step=4), "size of queries and keys of one head, before the map"
        ] = 16
        heads: Annotated[int, Choice(1, 2, 4), "heads; divides the width"] = 1
        normalise: Annotated[bool, "divide by the sum of the weights"] = True
        fixed_decay: Annotated[bool, "forget at a fixed rate for each head"] = False
        head_mix: Annotated[bool, "scale each head by a number that the token chooses"] = False
        compact: Annotated[bool, "keep each cross term of the Taylor map once"] = True
        random_features: Annotated[int, "features of a head under `performer`"] = 256
        max_len: Annotated[int, "positions that `cosformer` tells apart"] = 1024

        def __post_init__(self) -> None:
            if self.heads < 1 or self.d_model % self.heads:
                raise ValueError(f"heads is {self.heads}; it must divide the width {self.d_model}")
            for name in ("feature_dim", "random_features", "max_len"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            feature_size(self.feature_map, self.feature_dim)

        def canonical(self) -> Self:
            usual, used = type(self), self.feature_map
            return replace(
                self,
                compact=self.compact if used == "taylor" else usual.compact,
                random_features=self.random_features
                if used == "performer"
                else usual.random_features,
                max_len=self.max_len if used == "cosformer" else usual.max_len,
            )

        @property
        def map_name(self) -> str:
            """The kernel's name for the map and its form."""
            full = self.feature_map == "taylor" and not self.compact
            return f"{self.feature_map}_full" if full else self.feature_map

        @property
        def features(self) -> int:
            """Features per head."""
            return feature_size(self.map_name, self.feature_dim, self.random_features)

        @property
        def head_size(self) -> int:
            return self.d_model // self.heads

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            memory = (self.heads, self.features, self.head_size)
            parts = [StateTensor("memory", memory, accumulator(dtype))]
            if self.normalise:
                parts.append(StateTensor("normaliser", memory[:2], accumulator(dtype)))
            if self.feature_map == "cosformer":
                parts.append(StateTensor("position", (), torch.int64))
            return tuple(parts)

        def zoology_state_elements(self, context_len: int) -> int | None:
            if not self.normalise:
                return None
            # It counts a Taylor map as compact though it computes with the full one, and random
            # features as if they were as many as the numbers they are made of.
            counted = feature_size(self.feature_map, self.feature_dim, self.feature_dim)
            return self.heads * counted * (self.head_size + 1)

        def flops(self, context_len: int) -> int:
            projections = 4 * self.d_model * (self.heads * self.feature_dim + self.d_model)
            memory = self.heads * self.features * self.head_size
            normaliser = self.heads * self.features if self.normalise else 0
            feature_maps = 4 * self.heads * self.features
            if self.feature_map == "performer":
                feature_maps *= self.feature_dim  # a product with the random rows for q and for k
            forget = memory if self.fixed_decay else 0
            mix = 2 * self.d_model * self.heads + self.d_model if self.head_mix else 0
            return projections + 4 * (memory + normaliser) + feature_maps + forget + mix

        def can_use(self, family: str, backend: str) -> bool:
            if backend != "triton":
                return True
            is_taylor = self.map_name == "taylor" and self.normalise and not self.fixed_decay
            return is_taylor and taylor_linear_attention.takes(self.feature_dim, self.head_size)

    config: Config
    kernels: ClassVar = {"linear_attention": ("reference", "quadratic", "chunked", "triton")}
    residual_projections: ClassVar = ("out.weight",)
    projection: Tensor
    """Random rows of `performer`; other maps have none."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        inner = config.heads * config.feature_dim
        self.qk = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.value = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        for linear in (self.qk, self.value, self.out):
            nn.init.normal_(linear.weight, std=INIT_STD)
        if config.head_mix:
            self.head_scale = nn.Linear(config.d_model, config.heads)
            nn.init.normal_(self.head_scale.weight, std=INIT_STD)
            nn.init.ones_(self.head_scale.bias)
        if config.feature_map == "performer":
            rows_PK = orthogonal_projection(config.random_features, config.feature_dim)
            self.register_buffer("projection", rows_PK)

    def _mix(
        self, x_BTD: Tensor, state: State | None, at_BK: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the output, at some positions or at all, and the new state if one is given."""
        config, given = self.config, state or {}
        asked = x_BTD if at_BK is None else rows(x_BTD, at_BK)
        if at_BK is None:
            q, k = self.qk(x_BTD).unflatten(-1, (2, config.heads, -1)).unbind(2)
        else:
            q, k = (
                F.linear(x, part).unflatten(-1, (config.heads, -1))
                for x, part in zip((asked, x_BTD), self.qk.weight.chunk(2), strict=True)
            )
        v = self.value(x_BTD).unflatten(-1, (config.heads, -1))
        position_BT = None
        if config.feature_map == "cosformer":
            position_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
            if state is not None:
                position_BT = position_BT + state["position"][:, None]
        y_BTHV, memory, normaliser = linear_attention(
            q,
            k,
            v,
            feature_map=config.map_name,
            projection_PK=self.projection if config.feature_map == "performer" else None,
            position_BT=position_BT,
            max_len=config.max_len,
            log_decay_H=self._log_decay() if config.fixed_decay else None,
            normalise=config.normalise,
            memory_BHFV=given.get("memory"),
            normaliser_BHF=given.get("normaliser"),
            keep_state=state is not None,
            at_BT=at_BK,
            backend=self.backends["linear_attention"],
        )
        kept = {"memory": memory, "normaliser": normaliser}
        if state is not None and position_BT is not None:
            kept["position"] = state["position"] + x_BTD.shape[1]
        return self._out(y_BTHV, asked), {n: t for n, t in kept.items() if t is not None}

    def _out(self, y_HV: Tensor, x_D: Tensor) -> Tensor:
        """Scale the heads, and mix them."""
        if self.config.head_mix:
            y_HV = y_HV * self.head_scale(x_D)[..., None]
        out_D: Tensor = self.out(y_HV.flatten(-2))
        return out_D

    def _log_decay(self) -> Tensor:
        """log(g) of each head."""
        head_H = torch.arange(self.config.heads, device=self.out.weight.device)
        return torch.log1p(-torch.exp2(FASTEST_DECAY - head_H.double()))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._mix(x_BTD, None)[0]

    def outputs_at(self, x_BTD: Tensor, at_BK: Tensor) -> Tensor:
        is_long = x_BTD.shape[1] > taylor_linear_attention.LONGEST_PAIRS
        if is_long and self.backends["linear_attention"] == "triton":
            return super().outputs_at(x_BTD, at_BK)
        return self._mix(x_BTD, None, at_BK)[0]

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        return self._mix(x_BTD, state)

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        config, backend = self.config, self.backends["linear_attention"]
        if backend == "triton":
            q, k = self.qk(x_BD).unflatten(-1, (2, config.heads, -1)).unbind(1)
            v = self.value(x_BD).unflatten(-1, (config.heads, -1))
            y_BHV = taylor_linear_attention.step(
                q, k, v, state["memory"], state["normaliser"], backend=backend
            )
            return self._out(y_BHV, x_BD), state
        y_B1D, new_state = self.mix(x_BD[:, None], state)
        for name, tensor in state.items():
            tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state
