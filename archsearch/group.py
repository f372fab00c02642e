"""Members that are trained together: one flat buffer, one optimiser, one step for all of them.

Member parameters are views of one flat buffer [M, P]. A member whose loss is not finite is stopped
and counted; it changes no other member. The objective `just_read_twice` masks tokens; its masks
depend on the study's seed and the step alone, so that all members read the same.

Between two rungs nothing is read back to the host. On CUDA each step and each batch of an
evaluation is captured as one graph, and steps of a shape that comes often are compiled before; on
the CPU the same code runs as it is (`execution`). Knows nothing of rungs, of other groups, or of
whether it holds a whole population.

Shape suffixes: M members, P parameters; B batch, T tokens, K labelled positions.
"""

import math
from dataclasses import dataclass

import torch
from archsearch_kernels.dropout import hash32
from torch import Tensor

from archsearch.cost import compute_dtype
from archsearch.execution import Launcher
from archsearch.feed import Feed
from archsearch.grouped import GroupedModel, Named, stack_buffers
from archsearch.just_read_twice import Asked, just_read_twice
from archsearch.members import Member, dropout_seed, number_of
from archsearch.model import LanguageModel
from archsearch.mqar import Examples
from archsearch.optimiser import FlatAdamW
from archsearch.spec import TrainSpec

_COMPILED_FROM = 1000
"""Steps of one shape in a training from which compiling it, some ten seconds, is soon repaid."""

_ALIGNMENT = 32
"""Parameters start at multiples of this many elements, so that vector loads stay aligned."""


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a model lies in a row of the flat buffer."""

    shapes: dict[str, torch.Size]
    places: dict[str, slice]
    total: int

    @classmethod
    def of(cls, model: LanguageModel) -> "Layout":
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        places, total = {}, 0
        for name, shape in shapes.items():
            places[name] = slice(total, total + math.prod(shape))
            total += math.ceil(math.prod(shape) / _ALIGNMENT) * _ALIGNMENT
        return cls(shapes, places, total)

    def views(self, buffer_MP: Tensor) -> Named:
        """The parameters of all members as views of a buffer."""
        return {
            name: buffer_MP[:, place].view(-1, *self.shapes[name])
            for name, place in self.places.items()
        }


class Group:
    """Copies of a model, and their optimiser once training begins.

    Args:
        indices: of the members in their population, in order.
        models: where each member begins.
        code: the model that computes, on `launcher`'s device; its parameters are not read.
        seed: of the study; with a member's own seed it decides that member's dropout.
        dtype: of the master parameters (fp64 in tests). Activations are in this dtype too, but for
            precision `bf16`, where the model sees bf16 copies of the parameters.
        launcher: may serve other groups.
    """

    optimiser: FlatAdamW

    def __init__(
        self,
        indices: tuple[int, ...],
        members: tuple[Member, ...],
        models: list[LanguageModel],
        code: LanguageModel,
        head_backend: str,
        train: TrainSpec,
        seed: int,
        dtype: torch.dtype,
        launcher: Launcher,
    ) -> None:
        self.indices, self.members, self.train_spec = indices, members, train
        self._launcher = launcher
        device = launcher.device
        self._layout = Layout.of(code)
        self.flat_MP = torch.zeros(len(members), self._layout.total, dtype=dtype, device=device)
        views = self._layout.views(self.flat_MP)
        for index, model in enumerate(models):
            for name, parameter in model.named_parameters():
                views[name][index] = parameter.detach()
        working = compute_dtype(train.precision)
        self._working_MP = self.flat_MP if working is torch.float32 else self.flat_MP.to(working)
        self.parameters = self._layout.views(self._working_MP)
        self.buffers, self._dims = stack_buffers(models, device)
        self.model = GroupedModel(code, self._dims, head_backend)
        self._mask_token = code.vocab_size - 1
        self._mask_seed = torch.tensor([number_of("mask", seed)], device=device)
        seeds = [dropout_seed(seed, member.seed) for member in members]
        self._dropout_M = torch.tensor(seeds, device=device)
        self.alive_M = torch.ones(len(members), dtype=torch.bool, device=device)
        self._loss_sum_M = torch.zeros(len(members), dtype=dtype, device=device)
        self._found_M = torch.zeros(len(members), dtype=torch.int64, device=device)

    def begin(self, steps_per_epoch: int) -> None:
        """Make ready to train from the first step; a training that goes on copies into `state`."""
        total = self.train_spec.epochs * steps_per_epoch
        compiles = self._launcher.compiles and total >= _COMPILED_FROM
        rates = tuple(member.learning_rate for member in self.members)
        self.optimiser = FlatAdamW(self.flat_MP, rates, self.train_spec, steps_per_epoch, compiles)

    @property
    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes and the next step needs."""
        return {**self.optimiser.state, "alive": self.alive_M}

    def advance(self, steps: list[Feed]) -> None:
        """Train on the next batch of each of these feeds; reads nothing back."""
        for feed in steps:
            self._launch_step(feed)

    def _launch_step(self, feed: Feed) -> None:
        changed = (*self.state.values(), self._loss_sum_M, feed.next)
        self._launcher.run((self.indices, feed), lambda: self._step(feed), changed)

    def _step(self, feed: Feed) -> None:
        """One step of every member; launches work and reads nothing back."""
        optimiser = self.optimiser
        asked = self._asked(feed, optimiser.step)
        keys_M = None
        if self.train_spec.embed_dropout > 0:
            keys_M = hash32(self._dropout_M + optimiser.step)
        self._refresh()
        batch = (asked.tokens, asked.at, asked.labels, asked.weights, keys_M)
        arguments = (self.parameters, self.buffers, *batch)
        if feed.batches * self.train_spec.epochs >= _COMPILED_FROM:
            # Another group of as many members shares what is compiled.
            key = (feed, len(self.members), tuple(self._dims.values()))
            loss_M, *gradients = self._launcher.compiled(key, self.model.gradients, *arguments)
        else:
            loss_M, *gradients = self.model.gradients(*arguments)
        torch._foreach_copy_(list(self._layout.views(optimiser.grad_MP).values()), gradients)
        self.alive_M &= loss_M.isfinite()
        self._loss_sum_M += loss_M.masked_fill(~self.alive_M, 0.0)
        optimiser.update(self.alive_M)

    def _asked(self, feed: Feed, step: Tensor) -> Asked:
        """The next batch of a feed as the objective asks for it."""
        tokens_BT, at_BK, labels_BK = feed.fetch()
        objective = self.train_spec.objective
        if objective is None:
            return Asked(tokens_BT, at_BK, labels_BK.flatten(), None)
        key, prefix = hash32(self._mask_seed + step), feed.examples.prefix
        batch = (tokens_BT, at_BK, labels_BK)
        return just_read_twice(objective, *batch, prefix, self._mask_token, key)

    def _refresh(self) -> None:
        """Round the masters to the copies that the model sees."""
        if self._working_MP is not self.flat_MP:
            self._working_MP.copy_(self.flat_MP)

    def losses(self, steps: int) -> dict[int, float]:
        """Mean training loss since the last call of each member that has not diverged."""
        self.alive_M &= self.flat_MP.isfinite().all(dim=1)
        sums, alive = self._loss_sum_M.tolist(), self.alive_M.tolist()
        self._loss_sum_M.zero_()
        found = zip(self.indices, sums, alive, strict=True)
        return {index: loss / steps for index, loss, ok in found if ok}

    @torch.no_grad()
    def shares(self, examples: Examples, feeds: list[Feed]) -> Tensor:
        """Share of rows that each member answers rightly, share_M; 0 of those that diverged.

        The feeds are those of the examples.
        """
        self._refresh()
        self._found_M.zero_()
        for feed in feeds:
            self._launch_hits(feed)
        share_M = self._found_M.double() / examples.labels.numel()
        return share_M.masked_fill(~self.alive_M, 0.0)

    def _launch_hits(self, feed: Feed) -> None:
        def work() -> None:
            tokens_BT, at_BK, labels_BK = feed.fetch()
            state = (self.parameters, self.buffers)
            self._found_M += self.model.hits(*state, tokens_BT, at_BK, labels_BK.flatten())

        self._launcher.run((self.indices, feed), work, (self._found_M, feed.next))

    def weights(self, place: int) -> dict[str, Tensor]:
        """Parameters and saved buffers of one member, on the CPU, by their names in the model."""
        saved = self.model.model.state_dict()
        rows = {name: view[place] for name, view in self._layout.views(self.flat_MP).items()}
        for name, value in self.buffers.items():
            rows[name] = value if self._dims[name] is None else value[place]
        return {name: rows[name].detach().clone().cpu() for name in saved}
