"""Train all members of a trial, learning rates x seeds, from rung to rung.

They are trained together, or in groups of as many as fit the device: one group after the other
goes from one rung to the next, over the same batches, so that a rung has every member whatever the
groups are. A group that waits keeps its parameters and its optimiser, nothing else. A member's
numbers do not depend on its group.

Members that diverged leave at a rung: they are counted as diverged from then on, and the others go
on without them, in fewer groups where that is possible. What was captured or compiled for one size
serves no other, so there they leave only when at most half are left, and are masked until then.
Knows nothing of trials or messages beyond a `Rung`.

Shape suffixes: M members, P parameters, S segments.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from archsearch_kernels import REFERENCE
from torch import Tensor

from archsearch.arch import ArchSpec
from archsearch.errors import DivergedError
from archsearch.execution import Launcher, default_execution
from archsearch.feed import Feed, epoch_feeds, fetched_before, replace_examples
from archsearch.group import Group
from archsearch.members import Member, initial_model
from archsearch.messages import Rung
from archsearch.model import HEAD
from archsearch.mqar import Examples
from archsearch.spec import Execution, TrainSpec


@dataclass(frozen=True)
class Progress:
    """Training up to a rung: the rungs so far, and every tensor that training changes.

    The tensors have a row for each member still in training, whose places in the population are
    `members`; `groups` are the sizes of their groups, and `step` is of all.
    """

    rungs: tuple[Rung, ...]
    tensors: dict[str, Tensor]


def group_sizes(members: int, together: int) -> tuple[int, ...]:
    """Sizes of groups of at most `together`: as few as possible, or half as many again if they are
    then equal, because another size is captured and compiled anew."""
    least = -(-members // together)
    count = next((n for n in range(least, 3 * least // 2 + 1) if members % n == 0), least)
    return tuple(members // count + (index < members % count) for index in range(count))


class Population:
    """M copies of an architecture and their optimisers.

    Args:
        vocab_size: of the model; under an objective that masks, its last token is [MASK].
        seed: of the study; with a member's own seed it decides that member's start.
        backends: resolved backend of each kernel family; those not named keep the reference.
        dtype: of the master parameters (fp64 in tests).
        execution: how steps are launched; None: compiled on CUDA, eager on the CPU.
        together: members that are trained together at most; None: all.

    Raises:
        PluginError, InfeasibleError: from the mixers of the architecture.
    """

    def __init__(
        self,
        arch: ArchSpec,
        vocab_size: int,
        members: tuple[Member, ...],
        train: TrainSpec,
        seed: int,
        device: torch.device | str = "cpu",
        backends: Mapping[str, str] | None = None,
        dtype: torch.dtype = torch.float32,
        execution: Execution | None = None,
        together: int | None = None,
    ) -> None:
        self.members, self.train_spec = members, train
        self.device, self._dtype, self._seed = torch.device(device), dtype, seed
        self._execution = execution or default_execution(self.device)
        self._together = together or len(members)
        self._starts = {
            one: initial_model(arch, vocab_size, train, seed, one)
            for one in sorted({member.seed for member in members})
        }
        code = copy.deepcopy(self._starts[members[0].seed])
        self._code = code.to(device=self.device, dtype=dtype)
        self._code.use_backends(backends or {})
        self._head_backend = (backends or {}).get(HEAD, REFERENCE)
        self._rungs: list[Rung] = []
        self.plan: list[Feed] = []
        self._test_feeds: dict[int, list[Feed]] = {}
        sizes = group_sizes(len(members), self._together)
        self.groups = self._make_groups(tuple(range(len(members))), sizes)

    def _make_groups(self, indices: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Group, ...]:
        """New groups of these members, at their starts, which share one launcher."""
        self._launcher = Launcher(self._execution, self.device)
        groups, first = [], 0
        for size in sizes:
            own = indices[first : first + size]
            members = tuple(self.members[index] for index in own)
            models = [self._starts[member.seed] for member in members]
            given = (self._code, self._head_backend, self.train_spec, self._seed, self._dtype)
            groups.append(Group(own, members, models, *given, self._launcher))
            first += size
        return tuple(groups)

    def train(
        self,
        data: tuple[Examples, ...],
        selection: tuple[Examples, ...],
        progress: Progress | None = None,
        redraw: Callable[[int], tuple[Examples, ...]] | None = None,
    ) -> Iterator[Rung]:
        """Train to the end, yielding after each part of training what the members then recall.

        Args:
            progress: of a population that was made as this one was; training goes on from there,
                bit for bit, and the rungs until then are yielded first.
            redraw: gives the examples of an epoch after the first, which take the place of `data`;
                if it is None, every epoch has the same.

        Raises:
            DivergedError: no member has a finite loss any more.
        """
        train = self.train_spec
        self.plan = plan = epoch_feeds(data, train.batch_size)
        total, epoch = train.epochs * len(plan), 0
        self._rungs = list(progress.rungs) if progress is not None else []
        if progress is not None:
            self._restore(progress.tensors, len(plan))
        else:
            self._begin(len(plan))
        yield from self._rungs
        done, before = (self._rungs[-1].step, self._rungs[-1].seconds) if self._rungs else (0, 0.0)
        begun = time.perf_counter() - before
        for rung in range(len(self._rungs), train.rungs):
            stop = round(total * (rung + 1) / train.rungs)
            for first, last in _stretches(done, stop, len(plan) if redraw else total):
                if redraw is not None and first // len(plan) != epoch:
                    epoch = first // len(plan)
                    replace_examples(data, redraw(epoch))
                self._advance(plan, first, last)
            losses = self._losses(max(1, stop - done))
            done = stop
            recall = tuple(_mean(by) for by in self.recall(selection))
            if done < total:
                self._let_go(losses, len(plan))
            self._rungs.append(
                Rung(
                    rung=rung,
                    step=done,
                    epoch=done / len(plan),
                    seconds=time.perf_counter() - begun,
                    train_loss=losses,
                    selection_recall=recall,
                )
            )
            yield self._rungs[-1]

    def _advance(self, plan: list[Feed], first: int, last: int) -> None:
        """Take steps `first` to `last` with one group after the other."""
        steps = [plan[step % len(plan)] for step in range(first, last)]
        for group in self.groups:
            for feed in set(steps):
                feed.seek(fetched_before(feed, plan, first))
            group.advance(steps)

    @property
    def progress(self) -> Progress:
        """Where training stands, between two rungs of `train`."""
        return Progress(tuple(self._rungs), self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        """Copies of all that training changes, on the CPU; rows in the order of the groups."""
        states = [group.state for group in self.groups]
        tensors = {
            name: value.detach().cpu().clone()
            if name == "step"
            else torch.cat([state[name].detach().cpu() for state in states])
            for name, value in states[0].items()
        }
        indices = [index for group in self.groups for index in group.indices]
        sizes = [len(group.indices) for group in self.groups]
        return tensors | {"members": torch.tensor(indices), "groups": torch.tensor(sizes)}

    def _begin(self, steps_per_epoch: int) -> None:
        for group in self.groups:
            group.begin(steps_per_epoch)

    def _restore(self, tensors: Mapping[str, Tensor], steps_per_epoch: int) -> None:
        """Make groups of the members that tensors have rows of, and fill them; split as they were
        if as many may be together here."""
        indices, sizes = tuple(tensors["members"].tolist()), tuple(tensors["groups"].tolist())
        if max(sizes) > self._together:
            sizes = group_sizes(len(indices), self._together)
        self.groups = ()  # their memory is free before that of the new ones is taken
        self.groups = self._make_groups(indices, sizes)
        self._begin(steps_per_epoch)
        first = 0
        for group in self.groups:
            rows = slice(first, first + len(group.indices))
            for name, value in group.state.items():
                value.copy_(tensors[name] if name == "step" else tensors[name][rows])
            first = rows.stop

    def _let_go(self, losses: tuple[float | None, ...], steps_per_epoch: int) -> None:
        """Go on without the members that have no loss any more, if that costs less than masks."""
        indices = [index for group in self.groups for index in group.indices]
        kept = [place for place, index in enumerate(indices) if losses[index] is not None]
        most = len(indices) - 1 if self._execution == "eager" else len(indices) // 2
        if len(kept) > most:
            return
        tensors = self._tensors()
        rows = {
            name: value if name in ("step", "groups") else value[kept]
            for name, value in tensors.items()
        }
        rows["groups"] = torch.tensor(group_sizes(len(kept), self._together))
        self._restore(rows, steps_per_epoch)

    def _losses(self, steps: int) -> tuple[float | None, ...]:
        """Mean training loss of each member since the last call; None for those that diverged."""
        found = {index: loss for one in self.groups for index, loss in one.losses(steps).items()}
        if not found:
            raise DivergedError(
                f"all {len(self.members)} members reached a loss that is not finite; "
                "the smallest learning rate was "
                f"{min(member.learning_rate for member in self.members):g}"
            )
        return tuple(found.get(index) for index in range(len(self.members)))

    def recall(self, data: tuple[Examples, ...]) -> tuple[dict[str, float], ...]:
        """Accuracy at the labelled positions, by segment name, for each member; 0 if diverged."""
        names = [examples.name for examples in data]
        found = [dict.fromkeys(names, 0.0) for _ in self.members]
        for group in self.groups:
            shares = [group.shares(examples, self._feeds_of(examples)) for examples in data]
            for index, row in zip(group.indices, torch.stack(shares, 1).tolist(), strict=True):
                found[index] = dict(zip(names, row, strict=True))
        return tuple(found)

    def _feeds_of(self, examples: Examples) -> list[Feed]:
        """The batches of an evaluation. Each feed comes round to its start in one evaluation."""
        feeds = epoch_feeds((examples,), self.train_spec.test_batch_size)
        return self._test_feeds.setdefault(id(examples), feeds)

    def weights(self, index: int) -> dict[str, Tensor]:
        """Parameters and saved buffers of a member that is still in training, on the CPU, by their
        names in the model."""
        group = next(group for group in self.groups if index in group.indices)
        return group.weights(group.indices.index(index))


def _stretches(first: int, last: int, epoch_steps: int) -> Iterator[tuple[int, int]]:
    """Cut the steps from `first` to `last` where an epoch ends."""
    while first < last:
        stop = min(last, (first // epoch_steps + 1) * epoch_steps)
        yield first, stop
        first = stop


def _mean(by_segment: Mapping[str, float]) -> float:
    return sum(by_segment.values()) / len(by_segment)
