"""Causal softmax attention over the last `window` tokens, the current one included.

The state is a ring of keys and values (token a lies in slot a mod ring) and the number of tokens
seen. A context shorter than the window needs a ring of the context's length only.

Shape suffixes: B batch, T tokens, W slots of the ring, D model width, H heads, K head size.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from archsearch_kernels.rotary import rotate
from archsearch_kernels.sliding_window import sliding_window
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateTensor
from archsearch.space import Choice, Range

INIT_STD = 0.02
"""Standard deviation of every projection, as in the published recall recipe."""


class SlidingWindow(Mixer):
    """Every token sees itself and the `window - 1` before it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        window: Annotated[
            int, Range(4, 1024, scale="log2"), "tokens a token sees, itself included"
        ] = 64
        heads: Annotated[int, Choice(1, 2, 4), "heads; divides the width"] = 1
        rope: Annotated[bool, "rotate queries and keys by their position"] = False

        def __post_init__(self) -> None:
            if self.window < 1:
                raise ValueError(f"window is {self.window}; it must be at least 1")
            if self.heads < 1 or self.d_model % self.heads:
                raise ValueError(f"heads is {self.heads}; it must divide the width {self.d_model}")
            if self.rope and self.head_size % 2:
                raise ValueError(
                    f"rope needs an even head size; width {self.d_model} / {self.heads} heads "
                    f"gives {self.head_size}"
                )

        @property
        def head_size(self) -> int:
            return self.d_model // self.heads

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            ring = (min(self.window, context_len), self.heads, self.head_size)
            return (
                StateTensor("key", ring, dtype),
                StateTensor("value", ring, dtype),
                StateTensor("position", (), torch.int64),
            )

        def flops(self, context_len: int) -> int:
            full = min(self.window, context_len)
            seen = full * (full + 1) // 2 + (context_len - full) * full  # over the whole context
            return 8 * self.d_model**2 + round(4 * self.d_model * seen / max(context_len, 1))

    config: Config
    kernels: ClassVar = {"sliding_window": ("reference", "masked", "blocked")}
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def _project(self, x_BTD: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as (B, T, H, K); positions are (T,) or (B, T)."""
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.config.heads, -1)).unbind(2)
        return (rotate(q, position), rotate(k, position), v) if self.config.rope else (q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, exists_BS: Tensor | None) -> Tensor:
        y_BTHK = sliding_window(
            q,
            k,
            v,
            window=self.config.window,
            exists_BS=exists_BS,
            backend=self.backends["sliding_window"],
        )
        y_BTD: Tensor = self.out(y_BTHK.flatten(-2))
        return y_BTD

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self._project(x_BTD, torch.arange(x_BTD.shape[1], device=x_BTD.device))
        return self._attend(q, k, v, None)

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
