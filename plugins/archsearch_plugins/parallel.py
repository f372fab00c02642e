"""Mixers side by side on one input: hybrid heads, as in Hymba (Dong et al., arXiv:2411.13676).

Every part reads the layer's input and keeps a state of its own; what they make of a token is
brought to one size and merged. With N parts Y_i and RMSNorm(y) = y / sqrt(mean(y^2)):

    merge: mean       y = 1/N sum_i g_i * RMSNorm(Y_i(x))
    merge: weights    y = g * sum_i softmax(w)_i RMSNorm(Y_i(x))
    merge: heads      y = W_out [RMSNorm(Y_1(u_1)), ..., RMSNorm(Y_N(u_N))]
                      (u_1, ..., u_N) = W_in x

g are learned gains of each feature, w one learned number a part. `mean` is Hymba's rule, but that
each part projects its output before the norm, where Hymba projects the mean after it. `weights`
tells with N numbers how much of each part there is; `observe` shows them. With both, every part has
the width of the layer. `heads` divides the width instead, as the head-wise splits that Bae et al.
(arXiv:2510.04800) compare with hybrids of whole layers: the first part has `share` of it, rounded,
and the others share the rest alike. Falcon-H1 (arXiv:2507.22448) runs attention and a state space
model side by side too, and adds what they project, with no norm and fixed factors.

The norm is needed here: at their own starts and at width 64 what `gated_delta` puts out is 90 times
as large as what `attention` does, which would hardly be heard. Outputs below 1e-4 fade out. Without
it `heads` of a window of 8 and linear attention recall 0.1 on `tiny` at 1e-2, and with it 0.5.

Parts that are merged alike have no order, so that one layer has one hash: they are sorted, `share`
is turned round if that swaps two parts of `heads`, and the first of more than two stays there.
`share` counts with `heads` alone, and is what the rounded width of the first part is of the whole.

State is the union of the parts' states: tensor `memory` of the first part is `0.memory`. The gains,
or W_out, write to the residual stream, and nothing else does. Gains start at 0.5, w at 0, W_in and
W_out as N(0, 1 / inputs), and each part in its own way. Left out: Hymba's learned first tokens, and
caches that several layers share.

Shape suffixes: B batch, T tokens, D model width, N parts, U width of one part.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Self

import torch
from archsearch_kernels.precision import accumulator
from torch import Tensor, nn
from torch.nn import functional as F

from archsearch.mixer import Mixer, State, StateRange, StateTensor
from archsearch.registry import default_parts, load_mixer, make_config, part_of
from archsearch.space import Choice, Part, Parts

INITIAL_GAIN = 0.5
"""Of what is written to the residual stream; other mixers start near it.

On the recipe `tiny` at 3e-3, a window of 8 beside linear attention of 8 features recalls 0.78 (mean
of three seeds, four pairs) with gains of 0.5, 0.72 with 1, and 0.20 with 0.1.
"""

NORM_EPSILON = 1e-8
"""Added to means of squares: attention of width 16 starts with outputs of 4e-4 and more."""


class Parallel(Mixer):
    """Several mixers on one input, merged token by token."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        parts: Parts = (Part("gated_delta", {}), Part("sliding_window", {}))
        merge: Annotated[
            str, Choice("mean", "weights", "heads"), "how the outputs of the parts become one"
        ] = "mean"
        share: Annotated[
            float, Choice(0.25, 0.5, 0.75), "with heads: the first part's share of the width"
        ] = 0.5

        def __post_init__(self) -> None:
            if len(self.parts) < 2:
                raise ValueError(f"parts are {len(self.parts)}; there must be at least 2")
            for part in self.parts:
                if default_parts(part.mixer):
                    raise ValueError(f"a part is '{part.mixer}'; a part has no parts itself")
            if self.merge not in ("mean", "weights", "heads"):
                raise ValueError(f"merge is '{self.merge}'; it must be mean, weights or heads")
            if self.merge == "heads" and min(self.widths) < 1:
                raise ValueError(
                    f"share is {self.share:g}; it must leave every part some of the width "
                    f"{self.d_model}"
                )
            if sum(self.widths) != self.d_model and self.merge == "heads":
                rest = self.d_model - self.widths[0]
                raise ValueError(
                    f"share is {self.share:g}, which leaves {rest} of the width {self.d_model}; "
                    f"the other {len(self.parts) - 1} parts must divide that"
                )
            assert self.configs  # so that what their own rules exclude is known now

        def canonical(self) -> Self:
            parts = tuple(
                part_of(part.mixer, config.canonical())
                for part, config in zip(self.parts, self.configs, strict=True)
            )
            if self.merge != "heads":
                return replace(self, share=type(self).share, parts=tuple(sorted(parts, key=_order)))
            placed = list(zip(parts, self.widths, strict=True))
            is_apart = len(parts) > 2 and self.widths[0] != self.widths[1]
            begun = placed[:1] if is_apart else []
            placed = begun + sorted(placed[len(begun) :], key=lambda one: (_order(one[0]), one[1]))
            share = placed[0][1] / self.d_model
            return replace(self, share=share, parts=tuple(part for part, _width in placed))

        @property
        def widths(self) -> tuple[int, ...]:
            """Features of each part."""
            if self.merge != "heads":
                return (self.d_model,) * len(self.parts)
            first, others = round(self.share * self.d_model), len(self.parts) - 1
            return (first, *[(self.d_model - first) // others] * others)

        @cached_property
        def configs(self) -> tuple[Mixer.Config, ...]:
            """Configs of the parts."""
            return tuple(
                make_config(part.mixer, width, part.fields)
                for part, width in zip(self.parts, self.widths, strict=True)
            )

        def can_use(self, family: str, backend: str) -> bool:
            return all(config.can_use(family, backend) for config in self.configs)

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            return tuple(
                StateTensor(f"{i}.{one.name}", one.shape, one.dtype)
                for i, config in enumerate(self.configs)
                for one in config.state_spec(context_len, dtype)
            )

        def state_range(self, context_len: int, dtype: torch.dtype) -> StateRange:
            ranges = [config.state_range(context_len, dtype) for config in self.configs]
            return StateRange(*map(sum, zip(*ranges, strict=True)))

        def zoology_state_elements(self, context_len: int) -> int | None:
            counted = [config.zoology_state_elements(context_len) for config in self.configs]
            known = [number for number in counted if number is not None]
            return sum(known) if len(known) == len(counted) else None

        @property
        def prefix_len(self) -> int:
            return max(config.prefix_len for config in self.configs)

        def flops(self, context_len: int) -> int:
            parts = sum(config.flops(context_len) for config in self.configs)
            norms = 3 * sum(self.widths)  # square, sum, scale
            gains = 2 * len(self.parts) * self.d_model
            return parts + norms + (4 * self.d_model**2 if self.merge == "heads" else gains)

    config: Config
    residual_projections = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.parts = nn.ModuleList(
            load_mixer(part.mixer)(own)
            for part, own in zip(config.parts, config.configs, strict=True)
        )
        if config.merge == "heads":
            self.split = nn.Linear(config.d_model, config.d_model, bias=False)
            nn.init.normal_(self.split.weight, std=config.d_model**-0.5)
        merge = {"mean": _Mean, "weights": _Weighted, "heads": _Concatenated}[config.merge]
        self.out = merge(len(config.parts), config.d_model)

    @property
    def _mixers(self) -> list[Mixer]:
        return [part for part in self.parts if isinstance(part, Mixer)]

    def _inputs(self, x_BTD: Tensor) -> list[Tensor]:
        """What each part reads."""
        if self.config.merge != "heads":
            return [x_BTD] * len(self.parts)
        return list(torch.split(self.split(x_BTD), list(self.config.widths), dim=-1))

    def init_state(
        self, batch: int, context_len: int, dtype: torch.dtype, device: torch.device | str
    ) -> State:
        """The empty states of the parts, which need not be zeros."""
        return {
            f"{i}.{name}": tensor
            for i, mixer in enumerate(self._mixers)
            for name, tensor in mixer.init_state(batch, context_len, dtype, device).items()
        }

    def forward(self, x_BTD: Tensor) -> Tensor:
        pairs = zip(self._mixers, self._inputs(x_BTD), strict=True)
        y_BTD: Tensor = self.out([_normalised(mixer(x_BTU)) for mixer, x_BTU in pairs])
        return y_BTD

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, new_state = [], State()
        for i, (mixer, x_BTU) in enumerate(zip(self._mixers, self._inputs(x_BTD), strict=True)):
            y_BTU, new = mixer.mix(x_BTU, _of_part(i, state))
            outputs.append(_normalised(y_BTU))
            new_state |= {f"{i}.{name}": tensor for name, tensor in new.items()}
        return self.out(outputs), new_state

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, new_state = [], State()
        for i, (mixer, x_BU) in enumerate(zip(self._mixers, self._inputs(x_BD), strict=True)):
            y_BU, new = mixer.step(x_BU, _of_part(i, state))
            outputs.append(_normalised(y_BU))
            new_state |= {f"{i}.{name}": tensor for name, tensor in new.items()}
        return self.out(outputs), new_state

    def observe(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """Return what the parts tell, by number, and their weights if these are learned."""
        found = {
            f"{i}.{name}": seen
            for i, (mixer, x_BTU) in enumerate(zip(self._mixers, self._inputs(x_BTD), strict=True))
            for name, seen in mixer.observe(x_BTU).items()
        }
        return found | ({"weights": self.out.shares} if isinstance(self.out, _Weighted) else {})


class _Mean(nn.Module):
    """The mean of all outputs, each with a gain of its own."""

    def __init__(self, parts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((parts, width), INITIAL_GAIN))

    def forward(self, outputs: Sequence[Tensor]) -> Tensor:
        y_BTND = torch.stack(list(outputs), dim=-2)
        return (y_BTND * self.weight).mean(-2)


class _Weighted(nn.Module):
    """A weighted mean of all outputs, with one gain."""

    def __init__(self, parts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), INITIAL_GAIN))
        self.logits = nn.Parameter(torch.zeros(parts))

    @property
    def shares(self) -> Tensor:
        """The weight of each part; they add up to 1. In fp32 at least."""
        return self.logits.to(accumulator(self.logits.dtype)).softmax(0)

    def forward(self, outputs: Sequence[Tensor]) -> Tensor:
        y_BTND = torch.stack(list(outputs), dim=-2)
        shares_N1 = self.shares.to(y_BTND.dtype)[:, None]
        return (y_BTND * shares_N1).sum(-2) * self.weight


class _Concatenated(nn.Module):
    """A projection of all outputs, one after the other."""

    def __init__(self, parts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, outputs: Sequence[Tensor]) -> Tensor:
        return F.linear(torch.cat(list(outputs), dim=-1), self.weight)


def _of_part(number: int, state: State) -> State:
    """The state of one part, under its own names."""
    prefix = f"{number}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def _normalised(y_U: Tensor) -> Tensor:
    """Scale to a root mean square of 1; the mean of squares is in fp32 at least."""
    wide = y_U.to(accumulator(y_U.dtype))
    mean = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean + NORM_EPSILON)).to(y_U.dtype)


def _order(part: Part) -> tuple[str, str]:
    """A key that any parts can be sorted by."""
    return part.mixer, json.dumps(dict(part.fields), sort_keys=True)
