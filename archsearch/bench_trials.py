"""How many trained runs an hour: a population against one plain model after the other, in one go.

Both sides train the same architecture by the same recipe on the same device, end to end: drawing
the data, setting up, training, and an evaluation on the selection split after each epoch. The plain
side is the textbook loop, one model with torch's own optimiser, launched eagerly; it trains one
member of the population, whose recall is printed beside the population's, so a speed-up with
another score would be seen. It stops after fewer epochs where a full run takes long; its hour is
reckoned from those. Knows nothing of studies' storage or of Ray.

Shape suffixes: B batch, T tokens, K labelled positions, N = B K.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from archsearch_kernels.dropout import hash32
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from archsearch import __version__
from archsearch.arch import ArchSpec
from archsearch.architectures import architecture_names
from archsearch.cost import compute_dtype
from archsearch.device import device_model
from archsearch.errors import UsageError
from archsearch.members import Member, dropout_seed, initial_model, members_of
from archsearch.memory import members_together
from archsearch.model import LanguageModel, resolve_backends
from archsearch.mqar import Examples, generate
from archsearch.optimiser import rate_factor
from archsearch.population import Population
from archsearch.propose.corners import warm_start
from archsearch.spec import (
    CORNERS,
    Execution,
    MqarSpec,
    Segment,
    StudySpec,
    TrainSpec,
    model_vocab_size,
)


@dataclass(frozen=True)
class Pace:
    """How one side did.

    Attributes:
        runs: models trained together.
        epochs: trained and timed.
        setup_seconds: until the first step: data, initialisation.
        epoch_seconds: of each epoch and its evaluation; the first holds captures and compiles.
        recall: of each member on the selection split after each epoch.
        device_busy: share of the epoch after those in which a GPU computed; None on a CPU, or if
            there is none.
    """

    runs: int
    epochs: int
    setup_seconds: float
    epoch_seconds: tuple[float, ...]
    recall: tuple[tuple[float, ...], ...]
    device_busy: float | None

    def runs_per_hour(self, epochs: int) -> float:
        """Full runs of `epochs` an hour: what was timed, then more epochs like the last."""
        more = max(0, epochs - self.epochs)
        timed = self.epoch_seconds[:epochs]
        return 3600 * self.runs / (self.setup_seconds + sum(timed) + more * timed[-1])


def pace_of_population(
    arch: ArchSpec,
    task: MqarSpec,
    train: TrainSpec,
    seed: int,
    device: str,
    epochs: int,
    execution: Execution | None = None,
    deterministic: bool = False,
) -> Pace:
    """Train all members of a recipe together, for its first epochs.

    Args:
        deterministic: with torch's deterministic algorithms, under which a training on CUDA repeats
            bit by bit: gradients of the embedding are sorted sums in place of atomics. On a CPU
            every training does.
    """
    begun = time.perf_counter()
    draw, selection = partial(generate, task, "train", device), generate(task, "selection", device)
    data, redraw = draw(), draw if train.data == "fresh" else None
    train = train.model_copy(update={"rungs": train.epochs})
    backends = resolve_backends(arch, device, compute_dtype(train.precision))
    population = Population(
        arch,
        model_vocab_size(task, train),
        members_of(train),
        train,
        seed,
        device,
        backends,
        execution=execution,
        together=members_together(arch, task, train, device, backends),
    )
    trained = (rung.selection_recall for rung in population.train(data, selection, None, redraw))
    with _algorithms(deterministic):
        return _pace(len(population.members), begun, trained, epochs, device)


@contextmanager
def _algorithms(deterministic: bool) -> Iterator[None]:
    """Choose torch's algorithms for a while; memory that nothing reads is not filled."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def pace_of_plain_loop(
    arch: ArchSpec,
    task: MqarSpec,
    train: TrainSpec,
    seed: int,
    device: str,
    epochs: int,
    member: Member,
) -> Pace:
    """Train one member alone as one would without this package, for a recipe's first epochs.

    Raises:
        UsageError: a recipe with an objective of its own, or fresh data.
    """
    if train.objective is not None:
        raise UsageError("the plain loop trains on the next token; remove `train.objective`")
    if train.data == "fresh":
        raise UsageError("the plain loop trains on fixed examples; remove `train.data`")
    begun = time.perf_counter()
    data, selection = generate(task, "train", device), generate(task, "selection", device)
    model = initial_model(arch, task.vocab_size, train, seed, member.seed).to(device)
    model.use_backends(resolve_backends(arch, device, compute_dtype(train.precision)))
    key = torch.tensor(dropout_seed(seed, member.seed), device=device)
    trained = ((recall,) for recall in _plain_epochs(model, train, member, key, data, selection))
    return _pace(1, begun, trained, epochs, device)


def bench_values(
    spec: StudySpec,
    start: str,
    epochs: int,
    plain_epochs: int,
    execution: Execution | None,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Pace and score of both sides for one architecture of a study, and where they were taken.

    Args:
        start: which architecture: what `search.warm_start` may say.
        epochs: of the population; the plain loop trains `plain_epochs` of them.
        execution: how the population's steps are launched; None: as a trial would.
        deterministic: also time the population so, with what it costs.

    Raises:
        UsageError: no architecture of the space is meant, or the plain loop cannot follow the
            recipe.
    """
    if start not in CORNERS and start not in architecture_names():
        accepted = ", ".join((*CORNERS, *architecture_names()))
        raise UsageError(f"there is no architecture '{start}' to begin with; accepted: {accepted}")
    found = warm_start(
        spec.model_copy(update={"search": spec.search.model_copy(update={"warm_start": (start,)})})
    )
    if not found:
        raise UsageError(f"no architecture of study '{spec.study}' within its limits is '{start}'")
    arch, train = found[0].arch, spec.train
    device = "cuda" if spec.resources.gpus > 0 else "cpu"
    given = (arch, spec.task, train, spec.seed, device)
    plain_epochs, epochs = min(plain_epochs, epochs, train.epochs), min(epochs, train.epochs)
    member = members_of(train)[0]
    # Once untimed: whoever comes first would pay for what torch does once in a process.
    pace_of_plain_loop(arch, _first_batches(spec.task, train), train, spec.seed, device, 1, member)
    plain = pace_of_plain_loop(*given, plain_epochs, member)
    ours = pace_of_population(*given, epochs, execution)
    sorted_sums = pace_of_population(*given, epochs, execution, True) if deterministic else None
    rates = (ours.runs_per_hour(train.epochs), plain.runs_per_hour(train.epochs))
    return {
        "benchmark": "trials",
        "architecture": arch.summary,
        "recipe": spec.task.recipe,
        "epochs_of_a_run": train.epochs,
        "precision": train.precision,
        "members": [asdict(one) for one in members_of(train)],
        "population": asdict(ours) | {"runs_per_hour": rates[0]},
        "plain_loop": asdict(plain) | {"runs_per_hour": rates[1]},
        "ratio": rates[0] / rates[1],
        "deterministic": asdict(sorted_sums) if sorted_sums is not None else None,
        "recall_of_the_same_member": [ours.recall[plain_epochs - 1][0], plain.recall[-1][0]],
        "device": device_model(device),
        "threads": torch.get_num_threads(),
        "versions": {"archsearch": __version__, "torch": torch.__version__},
    }


def _first_batches(task: MqarSpec, train: TrainSpec) -> MqarSpec:
    """The task with one batch of each segment."""

    def first(segments: tuple[Segment, ...], batch: int) -> tuple[Segment, ...]:
        return tuple(
            one.model_copy(update={"examples": min(batch, one.examples)}) for one in segments
        )

    short = {
        "train": first(task.train, train.batch_size),
        "test": first(task.test, train.test_batch_size),
    }
    return task.model_copy(update=short)


def bench_text(values: Mapping[str, Any]) -> str:
    """The same for people."""
    ours, plain = values["population"], values["plain_loop"]
    ours_recall, plain_recall = values["recall_of_the_same_member"]
    lines = [
        f"{values['architecture']}, recipe {values['recipe']}, {values['precision']}, on "
        f"{values['device']}: full runs of {values['epochs_of_a_run']} epochs an hour",
        f"  population of {ours['runs']:3}  {ours['runs_per_hour']:9.1f}   "
        f"last epoch {ours['epoch_seconds'][-1]:.2f} s",
        f"  one plain model    {plain['runs_per_hour']:9.1f}   "
        f"last epoch {plain['epoch_seconds'][-1]:.2f} s",
        f"  ratio              {values['ratio']:9.1f}",
        f"  recall of the same member after epoch {plain['epochs']}: {ours_recall:.4f} in the "
        f"population, {plain_recall:.4f} alone",
    ]
    if ours["device_busy"] is not None:
        lines.append(f"  the GPU computes {ours['device_busy']:.0%} of an epoch of the population")
    if values["deterministic"] is not None:
        slower = values["deterministic"]["epoch_seconds"][-1] / ours["epoch_seconds"][-1] - 1
        lines.append(f"  deterministic algorithms: {slower:+.1%} time of the last epoch")
    return "\n".join(lines)


def _plain_epochs(
    model: LanguageModel,
    train: TrainSpec,
    member: Member,
    dropout_key: Tensor,
    data: tuple[Examples, ...],
    selection: tuple[Examples, ...],
) -> Iterator[float]:
    """Yield the recall on the selection split after each epoch."""
    optimiser = torch.optim.AdamW(
        model.parameters(), member.learning_rate, train.betas, weight_decay=train.weight_decay
    )
    steps = sum(-(-len(examples) // train.batch_size) for examples in data)
    step = 0
    for _ in range(train.epochs):
        for examples in data:
            for tokens_BT, at_BK, labels_BK in examples.batches(train.batch_size):
                rate = member.learning_rate * rate_factor(train, step, steps)
                optimiser.param_groups[0]["lr"] = rate
                key = hash32(dropout_key + step) if train.embed_dropout > 0 else None
                with _precision(train, tokens_BT.device):
                    logits = model.logits(model(tokens_BT, at_BK, key)).flatten(0, 1)
                loss = F.cross_entropy(logits.float(), labels_BK.flatten())
                optimiser.zero_grad()
                loss.backward()
                if train.grad_clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
                optimiser.step()
                step += 1
        yield _recall(model, train, selection)


@torch.no_grad()
def _recall(model: LanguageModel, train: TrainSpec, selection: tuple[Examples, ...]) -> float:
    shares = []
    for examples in selection:
        found: list[Tensor] = []
        for tokens_BT, at_BK, labels_BK in examples.batches(train.test_batch_size):
            with _precision(train, tokens_BT.device):
                logits = model.logits(model(tokens_BT, at_BK))
            found.append((logits.argmax(-1) == labels_BK).sum())
        shares.append(torch.stack(found).sum().item() / examples.labels.numel())
    return sum(shares) / len(shares)


def _precision(train: TrainSpec, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16")


def _pace(
    runs: int, begun: float, trained: Iterator[tuple[float, ...]], epochs: int, device: str
) -> Pace:
    """Time some epochs of training that yields recalls, set up since `begun`; profile one more."""
    setup_seconds = time.perf_counter() - begun
    recall, seconds = [], []
    for _ in range(epochs):
        begun = time.perf_counter()
        recall.append(next(trained))
        seconds.append(time.perf_counter() - begun)
    busy = _busy(trained) if device == "cuda" else None
    return Pace(runs, epochs, setup_seconds, tuple(seconds), tuple(recall), busy)


def _busy(trained: Iterator[tuple[float, ...]]) -> float | None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        begun = time.perf_counter()
        another = next(trained, None)
        lasted_us = 1e6 * (time.perf_counter() - begun)
    if another is None:
        return None
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type == torch.profiler.DeviceType.CUDA
    ]
    return covered(spans) / lasted_us


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
