"""Causal softmax attention over the last `window` tokens, as in Longformer (arXiv:2004.05150).

Each of H heads has queries of K = D / H numbers, and reads one of the G key-value heads:

    y_i = sum_{i - window < j <= i} softmax_j(q_i . k_j / sqrt(K)) v_j

The window counts the tokens that a token sees, **the current one included**; peers mean window + 1
or window / 2 + 1 by the same word. `kv_heads` is G; 0 stands for one key-value head for each query
head. `rope` rotates queries and keys by their position (arXiv:2104.09864), with angles position *
`rope_base`^(-2n/K). `qk_norm` scales every head's queries and keys to root mean square 1, times a
learned weight for each of the K numbers, before rotation (after arXiv:2010.04245).

The state is a ring of keys and values (token a lies in slot a mod ring) and the number of tokens
seen. A context shorter than the window needs a ring of the context's length only.

Projections start as N(0, 0.02^2), as in the published recall recipe; weights of norms at 1. Left
out are windows with gaps, and tokens that see or are seen by all.

Shape suffixes: B batch, T tokens, W slots of the ring, D model width, H query heads, G key-value
heads, K head size.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from archsearch_kernels.norm import rms_norm
from archsearch_kernels.rotary import BASE, rotate
from archsearch_kernels.sliding_window import WIDEST_TRITON, sliding_window
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor, rows
from archsearch.space import Choice, Range

INIT_STD = 0.02
"""Standard deviation of every projection, as in the published recall recipe."""


class SlidingWindow(Mixer):
    """Every token sees itself and the `window - 1` before it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        window: Annotated[
            int, Range(4, 4096, scale="log2"), "tokens a token sees, itself included"
        ] = 64
        heads: Annotated[int, Choice(1, 2, 4, 8, 16), "query heads; divides the width"] = 1
        kv_heads: Annotated[int, "key-value heads shared by the query heads; 0: one for each"] = 0
        rope: Annotated[bool, "rotate queries and keys by their position"] = False
        rope_base: Annotated[float, "base of the angles of `rope`"] = BASE
        qk_norm: Annotated[bool, "norm queries and keys, with learned weights"] = False

        def __post_init__(self) -> None:
            if self.window < 1:
                raise ValueError(f"window is {self.window}; it must be at least 1")
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
            rope = self.rope and self.window > 1  # the weight of a lone token is 1 in any case
            return replace(
                self,
                kv_heads=0 if self.kv_heads == self.heads else self.kv_heads,
                rope=rope,
                rope_base=self.rope_base if rope else BASE,
            )

        @property
        def groups(self) -> int:
            """Number of key-value heads."""
            return self.kv_heads or self.heads

        @property
        def head_size(self) -> int:
            return self.d_model // self.heads

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            ring = (min(self.window, context_len), self.groups, self.head_size)
            return (
                StateTensor("key", ring, dtype),
                StateTensor("value", ring, dtype),
                StateTensor("position", (), torch.int64),
            )

        def zoology_state_elements(self, context_len: int) -> int:
            return 2 * self.groups * self.head_size * self.window

        def flops(self, context_len: int) -> int:
            keys = self.groups * self.head_size
            projections = 4 * self.d_model * (self.d_model + keys)
            norms = 4 * (self.d_model + keys) if self.qk_norm else 0  # square, sum, scale, weight
            full = min(self.window, context_len)
            seen = full * (full + 1) // 2 + (context_len - full) * full  # over the whole context
            return projections + norms + round(4 * self.d_model * seen / max(context_len, 1))

        def can_use(self, family: str, backend: str) -> bool:
            return backend != "triton" or self.head_size <= WIDEST_TRITON

    config: Config
    kernels: ClassVar = {"sliding_window": ("reference", "masked", "blocked", "triton")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        keys = config.groups * config.head_size
        self.qkv = nn.Linear(config.d_model, config.d_model + 2 * keys, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
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

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exists_BS: Tensor | None,
        at_BT: Tensor | None = None,
    ) -> Tensor:
        y_BTHK = sliding_window(
            q,
            k,
            v,
            window=self.config.window,
            exists_BS=exists_BS,
            at_BT=at_BT,
            backend=self.backends["sliding_window"],
        )
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
        return self._attend(q, k, v, None, at_BK)

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        T, ring = x_BTD.shape[1], state["key"].shape[1]
        start_B1 = state["position"][:, None]
        position_BT = start_B1 + torch.arange(T, device=x_BTD.device)
        q, k, v = self._project(x_BTD, position_BT)
        past_BW = start_B1 + torch.arange(-ring, 0, device=x_BTD.device)  # in order of time
        exists_BS = torch.cat((past_BW, position_BT), dim=1) >= 0
        slot = (past_BW % ring)[..., None, None].expand_as(state["key"])
        keys = torch.cat((state["key"].gather(1, slot), k), dim=1)
        values = torch.cat((state["value"].gather(1, slot), v), dim=1)
        y_BTD = self._attend(q, keys, values, exists_BS)
        kept = min(T, ring)  # older tokens of the segment would be overwritten anyway
        index = (position_BT[:, T - kept :] % ring)[..., None, None].expand(-1, -1, *k.shape[2:])
        new_state = {
            "key": state["key"].scatter(1, index, k[:, T - kept :]),
            "value": state["value"].scatter(1, index, v[:, T - kept :]),
            "position": state["position"] + T,
        }
        return y_BTD, new_state

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        ring = state["key"].shape[1]
        position_B1 = state["position"][:, None]
        q, k, v = self._project(x_BD[:, None], position_B1)
        index = (position_B1 % ring)[..., None, None].expand_as(k)
        state["key"].scatter_(1, index, k)
        state["value"].scatter_(1, index, v)
        # Slots fill in order; once the ring is full all are seen, and their order does not matter.
        exists_BW = torch.arange(ring, device=x_BD.device) <= position_B1
        y_B1D = self._attend(q, state["key"], state["value"], exists_BW)
        state["position"].add_(1)
        return y_B1D.squeeze(1), state
