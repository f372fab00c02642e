"""The whole contract of a mixer plugin: one class, ordinary PyTorch, written for one model.

A mixer maps a sequence of vectors to a sequence of vectors and may keep a state between segments.
It knows nothing of populations, devices, Ray, Optuna or the model around it. `archsearch.testing`
ships the tests that hold a plugin to what it declares here.

Shape suffixes: B batch, T tokens, K positions asked for, D model width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from archsearch.space import Parts

State = dict[str, Tensor]
"""What a mixer keeps of the past, by name; every tensor has the batch as its first dimension."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor that decoding **one** sequence keeps; the batch is not in `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateRange(NamedTuple):
    """Bytes that decoding one sequence keeps where that depends on the data."""

    minimum: int
    expected: int
    maximum: int


class Mixer(nn.Module):
    """Base of every mixer: subclass it, nest a `Config`, write `mix`.

    `forward` and `step` follow from `mix`; override them for speed, and the contract still holds
    them equal. The mixer owns its initialisation.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Fields with declared ranges, defaults and units. Nothing is repeated elsewhere."""

        d_model: int
        parts: Parts = ()
        """The mixers that a composite mixer is made of; such a one has at least two by default."""

        def canonical(self) -> Self:
            """The one config that stands for all that make the same module.

            Override it where a field makes no difference beside the others, or where two values of
            one mean the same: return `replace(self, ...)` with the usual value there. Two configs
            with one canonical form are trained once, so nothing may tell them apart: parameters,
            outputs, gradients, state, FLOPs. What it returns is canonical already.
            """
            return self

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            """Every tensor kept while decoding one sequence of up to `context_len` tokens.

            KV entries are in the compute dtype `dtype`; recurrent states and normalisers are fp32
            (fp64 where `dtype` is). Where the data decide what is kept, the most that can be.
            """
            raise NotImplementedError

        def state_range(self, context_len: int, dtype: torch.dtype) -> StateRange:
            """Least, expected and most bytes; the same three times unless the data decide."""
            most = state_bytes(self, context_len, dtype)
            return StateRange(most, most, most)

        def zoology_state_elements(self, context_len: int) -> int | None:
            """State of this mixer as the Zoology repository counts it, in numbers; None: unknown.

            Its published figures draw 4 bytes each. `cost.zoology_state_bytes` sums them.
            """
            return None

        @property
        def prefix_len(self) -> int:
            """Tokens at the start of a sequence that are read together; 0 for a causal mixer.

            Outputs at the first `prefix_len` tokens may depend on each other. The first segment
            given to `mix` holds all of them, or is the whole prompt if that is shorter.
            """
            return 0

        def can_use(self, family: str, backend: str) -> bool:
            """Whether an allowed backend of a kernel family has programs for these fields.

            A composite mixer answers for its parts.
            """
            return True

        def flops(self, context_len: int) -> int:
            """Forward FLOPs per token, averaged over a context; one multiply-add counts 2."""
            raise NotImplementedError

    kernels: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Kernel families this mixer calls, and the backends it allows for each."""

    per_token: ClassVar[bool] = False
    """True: looks at one position at a time, whatever the leading shape of x, and keeps no state.
    Such a mixer with a field `ratio` can follow every other as its channel mixer."""

    residual_projections: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that write to the residual stream; the model may rescale these."""

    config: Config
    backends: dict[str, str]
    """Resolved backend of each kernel family; set by the model, `reference` until then."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.backends = dict.fromkeys(self.kernels, "reference")

    def init_state(
        self, batch: int, context_len: int, dtype: torch.dtype, device: torch.device | str
    ) -> State:
        """Return the empty state: exactly what `state_spec` declares, in zeros.

        A mixer may fill a tensor with what follows from its parameters alone, such as a filter.
        """
        return {
            part.name: torch.zeros(batch, *part.shape, dtype=part.dtype, device=device)
            for part in self.config.state_spec(context_len, dtype)
        }

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix a whole segment, continuing from any state; the given state is left as it was.

        Segments of any lengths, one after the other, give what one pass over all of them gives.
        """
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix a whole sequence from the empty state and keep no state (training)."""
        state = self.init_state(x_BTD.shape[0], x_BTD.shape[1], x_BTD.dtype, x_BTD.device)
        return self.mix(x_BTD, state)[0]

    def outputs_at(self, x_BTD: Tensor, at_BK: Tensor) -> Tensor:
        """What `forward` returns at some positions alone: y_BKD.

        A model asks its last mixer so where only some tokens have labels. Override it where that
        saves work; gradients are those of gathering, too.

        Args:
            at_BK: int64 positions in [0, T), in any order.
        """
        y_BTD: Tensor = self(x_BTD)
        return rows(y_BTD, at_BK)

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one token. May update the state in place: the one passed in is spent.

        Reads nothing back to the host, so that a decode loop can be captured in a CUDA graph.
        """
        y_BTD, state = self.mix(x_BD.unsqueeze(1), state)
        return y_BTD.squeeze(1), state

    def observe(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """What a report should know of how this mixer treats a batch, such as shares of routes."""
        return {}


def rows(x_BTD: Tensor, at_BK: Tensor) -> Tensor:
    """Pick positions of each sequence, whatever follows: x_BKD."""
    index = at_BK.view(*at_BK.shape, *(1,) * (x_BTD.dim() - 2))
    return x_BTD.gather(1, index.expand(*at_BK.shape, *x_BTD.shape[2:]))


def state_bytes(config: Mixer.Config, context_len: int, dtype: torch.dtype) -> int:
    """Bytes that decoding one sequence of `context_len` tokens keeps in this mixer."""
    return sum(part.state_bytes for part in config.state_spec(context_len, dtype))
