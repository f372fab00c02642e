"""Train M copies of one architecture together: learning rates x seeds, one pass over the data.

Member parameters are views of one flat buffer [M, P]; the forward pass is a vmap over the plain
module, the backward pass ordinary autograd of the summed member losses, so a member's numbers are
those of a model trained alone, whatever M is and whoever the others are. A member whose loss is not
finite is stopped and counted; it changes no other member.

The objective `just_read_twice` masks tokens; its masks depend on the study's seed and the step
alone, so that all members read the same.

Between two rungs nothing is read back to the host. On CUDA each step and each batch of an
evaluation is captured as one graph, and steps of a shape that comes often are compiled before; on
the CPU the same code runs as it is (`execution`). Knows nothing of trials or messages.

Shape suffixes: M members, P parameters; B batch, T tokens, K labelled positions, D width.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from archsearch_kernels import REFERENCE
from archsearch_kernels.head_loss import head_loss, hits
from torch import Tensor
from torch.func import functional_call, vmap

from archsearch.arch import ArchSpec
from archsearch.cost import compute_dtype
from archsearch.errors import DivergedError
from archsearch.execution import Launcher, default_execution
from archsearch.feed import Feed, epoch_feeds, replace_examples
from archsearch.just_read_twice import Asked, just_read_twice
from archsearch.messages import Rung
from archsearch.model import HEAD, LanguageModel, hash32
from archsearch.mqar import Examples
from archsearch.optimiser import FlatAdamW
from archsearch.spec import Execution, TrainSpec

_COMPILED_FROM = 1000
"""Steps of one shape in a training from which compiling it, some ten seconds, is soon repaid."""

_ALIGNMENT = 32
"""Parameters start at multiples of this many elements, so that vector loads stay aligned."""

Named = dict[str, Tensor]
"""Parameters or buffers of all members, by their names in the model."""


@dataclass(frozen=True)
class Member:
    """One copy. Members of one seed share initialisation and dropout at every learning rate."""

    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Progress:
    """Training up to a rung: the rungs so far, and every tensor that training changes."""

    rungs: tuple[Rung, ...]
    tensors: dict[str, Tensor]


def members_of(train: TrainSpec) -> tuple[Member, ...]:
    """Every learning rate with every seed, seeds varying fastest."""
    return tuple(Member(rate, seed) for rate in train.learning_rates for seed in range(train.seeds))


def _number(*parts: object) -> int:
    """A 63-bit seed that depends on the parts alone."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def dropout_seed(seed: int, member_seed: int) -> int:
    """What a member's dropout masks are drawn from; the step is added to it."""
    return _number("dropout", seed, member_seed)


def initial_model(
    arch: ArchSpec, vocab_size: int, train: TrainSpec, seed: int, member_seed: int
) -> LanguageModel:
    """Build the model that a member starts from, on the CPU; leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_number("init", seed, member_seed))
        return LanguageModel(arch, vocab_size, train.embed_dropout)


class Population:
    """M copies of an architecture and their optimiser.

    Args:
        vocab_size: of the model; under an objective that masks, its last token is [MASK].
        seed: of the study; with a member's own seed it decides that member's start.
        backends: resolved backend of each kernel family; those not named keep the reference.
        dtype: of the master parameters (fp64 in tests). Activations are in this dtype too, but for
            precision `bf16`, where the model sees bf16 copies of the parameters.
        execution: how steps are launched; None: compiled on CUDA, eager on the CPU.

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
    ) -> None:
        self.members, self.train_spec = members, train
        self.device = torch.device(device)
        starts = {
            one: initial_model(arch, vocab_size, train, seed, one)
            for one in sorted({member.seed for member in members})
        }
        models = [starts[member.seed] for member in members]
        self._lay_out(models, dtype)
        self._model = models[0].to(device=self.device, dtype=dtype)
        self._model.use_backends(backends or {})
        self._head_backend = (backends or {}).get(HEAD, REFERENCE)
        self._mask_token = vocab_size - 1
        self._mask_seed = torch.tensor([_number("mask", seed)], device=self.device)
        self._dropout_M = torch.tensor(
            [dropout_seed(seed, member.seed) for member in members], device=self.device
        )
        self.alive_M = torch.ones(len(members), dtype=torch.bool, device=self.device)
        self._loss_sum_M = torch.zeros(len(members), dtype=dtype, device=self.device)
        self._found_M = torch.zeros(len(members), dtype=torch.int64, device=self.device)
        self._launcher = Launcher(execution or default_execution(self.device), self.device)
        self._state: dict[str, Tensor] = {}
        self._rungs: list[Rung] = []
        self._test_feeds: dict[int, list[Feed]] = {}

    def _lay_out(self, models: list[LanguageModel], dtype: torch.dtype) -> None:
        """Copy the members' parameters into one buffer and make the views the model works on."""
        shapes = {name: p.shape for name, p in models[0].named_parameters()}
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        places, total = {}, 0
        for name, size in sizes.items():
            places[name] = slice(total, total + size)
            total += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        self.flat_MP = torch.zeros(len(models), total, dtype=dtype, device=self.device)
        for row_P, model in zip(self.flat_MP, models, strict=True):
            for name, parameter in model.named_parameters():
                row_P[places[name]] = parameter.detach().flatten()
        working = compute_dtype(self.train_spec.precision)
        self._working_MP = self.flat_MP if working is torch.float32 else self.flat_MP.to(working)

        def views(buffer_MP: Tensor) -> dict[str, Tensor]:
            return {
                name: buffer_MP[:, places[name]].view(-1, *shape) for name, shape in shapes.items()
            }

        self._views = views
        self._parameters = views(self._working_MP)
        self._buffers, self._buffer_dims = _stack_buffers(models, self.device)

    def _hidden(
        self,
        parameters: Named,
        buffers: Named,
        tokens_BT: Tensor,
        at_BK: Tensor,
        keys_M: Tensor | None,
    ) -> Tensor:
        """Final hidden vectors of every member at the labelled rows: hidden_MND, N = B K."""

        def one(parameters: Named, buffers: Named, key: Tensor | None) -> Tensor:
            hidden_BKD: Tensor = functional_call(
                self._model, {**parameters, **buffers}, (tokens_BT, at_BK, key)
            )
            return hidden_BKD.flatten(0, 1)

        in_dims = (0, self._buffer_dims, None if keys_M is None else 0)
        grouped = vmap(one, in_dims=in_dims, randomness="different")
        hidden_MND: Tensor = grouped(parameters, buffers, keys_M)
        return hidden_MND

    def _gradients(
        self,
        parameters: Named,
        buffers: Named,
        tokens_BT: Tensor,
        at_BK: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
        keys_M: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Loss of each member, and its gradient by every parameter; changes nothing."""
        leaves = {name: view.detach().requires_grad_() for name, view in parameters.items()}
        hidden_MND = self._hidden(leaves, buffers, tokens_BT, at_BK, keys_M)
        head_MVD = leaves[self._model.arch.head_matrix]
        loss_M = head_loss(
            hidden_MND,
            head_MVD,
            labels_N=labels_N,
            weights_N=weights_N,
            backend=self._head_backend,
        )
        return loss_M.detach(), *torch.autograd.grad(loss_M.sum(), list(leaves.values()))

    def _hits(self, tokens_BT: Tensor, at_BK: Tensor, labels_N: Tensor) -> Tensor:
        """Labelled rows that each member answers rightly."""
        state = (self._parameters, self._buffers)
        hidden_MND = self._hidden(*state, tokens_BT, at_BK, None)
        head_MVD = self._parameters[self._model.arch.head_matrix]
        return hits(hidden_MND, head_MVD, labels_N, backend=self._head_backend)

    def _asked(self, feed: Feed, step: Tensor) -> Asked:
        """The next batch of a feed as the objective asks for it."""
        tokens_BT, at_BK, labels_BK = feed.fetch()
        objective = self.train_spec.objective
        if objective is None:
            return Asked(tokens_BT, at_BK, labels_BK.flatten(), None)
        key, prefix = hash32(self._mask_seed + step), feed.examples.prefix
        batch = (tokens_BT, at_BK, labels_BK)
        return just_read_twice(objective, *batch, prefix, self._mask_token, key)

    def _step(self, feed: Feed, optimiser: FlatAdamW) -> None:
        """One step of every member; launches work and reads nothing back."""
        asked = self._asked(feed, optimiser.step)
        keys_M = None
        if self.train_spec.embed_dropout > 0:
            keys_M = hash32(self._dropout_M + optimiser.step)
        if self._working_MP is not self.flat_MP:
            self._working_MP.copy_(self.flat_MP)
        batch = (asked.tokens, asked.at, asked.labels, asked.weights, keys_M)
        arguments = (self._parameters, self._buffers, *batch)
        if feed.batches * self.train_spec.epochs >= _COMPILED_FROM:
            loss_M, *gradients = self._launcher.compiled(feed, self._gradients, *arguments)
        else:
            loss_M, *gradients = self._gradients(*arguments)
        torch._foreach_copy_(list(self._views(optimiser.grad_MP).values()), gradients)
        self.alive_M &= loss_M.isfinite()
        self._loss_sum_M += loss_M.masked_fill(~self.alive_M, 0.0)
        optimiser.update(self.alive_M)

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
        plan = epoch_feeds(data, train.batch_size)
        total = train.epochs * len(plan)
        compiles = self._launcher.compiles and total >= _COMPILED_FROM
        rates = tuple(member.learning_rate for member in self.members)
        optimiser = FlatAdamW(self.flat_MP, rates, train, len(plan), compiles)
        self._state = {**optimiser.state, "alive": self.alive_M}
        self._rungs = self._go_on(progress, plan) if progress is not None else []
        yield from self._rungs
        done, before = (self._rungs[-1].step, self._rungs[-1].seconds) if self._rungs else (0, 0.0)
        begun, epoch = time.perf_counter() - before, 0
        for rung in range(len(self._rungs), train.rungs):
            stop = round(total * (rung + 1) / train.rungs)
            for step in range(done, stop):
                if redraw is not None and step // len(plan) != epoch:
                    epoch = step // len(plan)
                    replace_examples(data, redraw(epoch))
                self._launch_step(plan[step % len(plan)], optimiser)
            losses = self._losses(max(1, stop - done))
            done = stop
            recall = tuple(_mean(by) for by in self.recall(selection))
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

    @property
    def progress(self) -> Progress:
        """Where training stands, between two rungs of `train`."""
        tensors = {name: value.detach().cpu().clone() for name, value in self._state.items()}
        return Progress(tuple(self._rungs), tensors)

    def _go_on(self, progress: Progress, plan: list[Feed]) -> list[Rung]:
        for name, value in self._state.items():
            value.copy_(progress.tensors[name])
        epochs, steps = divmod(progress.rungs[-1].step, len(plan))
        for feed in set(plan):
            feed.seek(epochs * plan.count(feed) + plan[:steps].count(feed))
        return list(progress.rungs)

    def _launch_step(self, feed: Feed, optimiser: FlatAdamW) -> None:
        changed = (*optimiser.state.values(), self.alive_M, self._loss_sum_M, feed.next)
        self._launcher.run(feed, lambda: self._step(feed, optimiser), changed)

    def _losses(self, steps: int) -> tuple[float | None, ...]:
        """Mean training loss of each member since the last call; None for those that diverged."""
        self.alive_M &= self.flat_MP.isfinite().all(dim=1)
        sums, alive = self._loss_sum_M.tolist(), self.alive_M.tolist()
        self._loss_sum_M.zero_()
        if not any(alive):
            raise DivergedError(
                f"all {len(self.members)} members reached a loss that is not finite; "
                "the smallest learning rate was "
                f"{min(member.learning_rate for member in self.members):g}"
            )
        return tuple(loss / steps if ok else None for loss, ok in zip(sums, alive, strict=True))

    @torch.no_grad()
    def recall(self, data: tuple[Examples, ...]) -> tuple[dict[str, float], ...]:
        """Accuracy at the labelled positions, by segment name, for each member; 0 if diverged."""
        if self._working_MP is not self.flat_MP:
            self._working_MP.copy_(self.flat_MP)
        found_S: list[Tensor] = []
        for examples in data:
            feeds = self._test_feeds.setdefault(
                id(examples), epoch_feeds((examples,), self.train_spec.test_batch_size)
            )
            self._found_M.zero_()
            for feed in feeds:
                self._launch_hits(feed)
            share_M = self._found_M.double() / examples.labels.numel()
            found_S.append(share_M.masked_fill(~self.alive_M, 0.0))
        names = [examples.name for examples in data]
        shares = torch.stack(found_S, dim=1).tolist()
        return tuple(dict(zip(names, row, strict=True)) for row in shares)

    def _launch_hits(self, feed: Feed) -> None:
        def work() -> None:
            tokens_BT, at_BK, labels_BK = feed.fetch()
            self._found_M += self._hits(tokens_BT, at_BK, labels_BK.flatten())

        self._launcher.run(feed, work, (self._found_M, feed.next))

    def weights(self, index: int) -> dict[str, Tensor]:
        """Parameters and saved buffers of one member, on the CPU, by their names in the model."""
        saved = self._model.state_dict()
        rows = {name: view[index] for name, view in self._views(self.flat_MP).items()}
        for name, value in self._buffers.items():
            rows[name] = value if self._buffer_dims[name] is None else value[index]
        return {name: rows[name].detach().clone().cpu() for name in saved}


def _stack_buffers(
    models: list[LanguageModel], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """Buffers of the members: one copy (vmap dimension None) where all agree, else stacked."""
    buffers: dict[str, Tensor] = {}
    dims: dict[str, int | None] = {}
    for name, first in models[0].named_buffers():
        each = [model.get_buffer(name) for model in models]
        same = all(torch.equal(first, other) for other in each)
        buffers[name] = (first if same else torch.stack(each)).to(device)
        dims[name] = None if same else 0
    return buffers, dims


def _mean(by_segment: Mapping[str, float]) -> float:
    return sum(by_segment.values()) / len(by_segment)
