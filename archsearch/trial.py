"""Run one trial: train a population, score it, profile the architecture, report as events.

A generator of events that never raises: whatever goes wrong becomes one `Failed` of the right
class. The learning rate is chosen on the selection split and reported on the report split. Knows
nothing of Ray, Optuna, MLflow or the database, and writes nothing but the shipped plugin files.
"""

import os
import platform
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from archsearch_kernels import REFERENCE
from safetensors.torch import save

from archsearch import __version__
from archsearch.checkpoint import Checkpoint
from archsearch.cost import compute_dtype
from archsearch.device import device_model
from archsearch.errors import (
    ArchsearchError,
    DivergedError,
    FailureClass,
    InfeasibleError,
    KernelRefusedError,
)
from archsearch.kernel_check import (
    HEAD_SIZES,
    check_key,
    find_verdict,
    library_versions,
    require,
)
from archsearch.members import members_of
from archsearch.memory import members_together
from archsearch.messages import (
    Checked,
    Evaluated,
    Evaluation,
    Event,
    Failed,
    MemberResult,
    Profiled,
    Rung,
    Started,
    Stopped,
    TrialRequest,
)
from archsearch.mixer import Mixer
from archsearch.model import ENTRY, HEAD, resolve_backends
from archsearch.mqar import generate
from archsearch.population import Population
from archsearch.profile import profile
from archsearch.registry import add_plugin_source
from archsearch.spec import MqarSpec

_CLASSES: tuple[tuple[type[BaseException], FailureClass], ...] = (
    (DivergedError, FailureClass.DIVERGED),
    (InfeasibleError, FailureClass.INFEASIBLE),
    (KernelRefusedError, FailureClass.KERNEL_REFUSED),
    (torch.OutOfMemoryError, FailureClass.OUT_OF_MEMORY),
    (MemoryError, FailureClass.OUT_OF_MEMORY),
    (OSError, FailureClass.LOST),
)
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"
"""How torch words a failed allocation on the CPU, which is a plain RuntimeError."""


def run_trial(request: TrialRequest) -> Iterator[Event]:
    """Yield `Started`, a `Checked` per kernel that is not known to be right here, a `Rung` per
    evaluation, `Evaluated`, `Profiled`, as far as it is wanted.

    Or end with `Stopped` after a rung, or with `Failed`.
    """
    try:
        with _settings(request):
            yield from _run(request)
    except Exception as error:
        yield _failed(error)
    except SystemExit as error:
        if not _is_of_mixer(error):
            raise  # this worker is told to end, which says nothing about the architecture
        yield _failed(error)


def _run(request: TrialRequest) -> Iterator[Event]:
    yield Started(node=platform.node(), pid=os.getpid(), device_model=device_model(request.device))
    for plugin in request.plugins:
        add_plugin_source(plugin.name, plugin.source)
    dtype = compute_dtype(request.train.precision)
    backends = resolve_backends(request.arch, request.device, dtype)
    yield from _check(request, backends, dtype)
    if request.train_wanted:
        was_stopped = yield from _train(request, backends)
        if was_stopped or not request.profile_wanted:
            return
    yield Profiled(
        profile=profile(
            request.arch,
            request.vocab_size,
            request.profile,
            request.train.precision,
            request.device,
            backends,
        )
    )


def _check(
    request: TrialRequest, backends: Mapping[str, str], dtype: torch.dtype
) -> Iterator[Checked]:
    """Compare kernels with their references, but for those known to agree on such a device."""
    model = device_model(request.device)
    for family, backend in backends.items():
        sizes = (request.arch.width,) if family in (HEAD, *ENTRY) else HEAD_SIZES
        key = check_key(family, backend, model, sizes, dtype)
        if backend == REFERENCE or key in request.kernels_passed:
            continue
        verdict = find_verdict(family, backend, request.device, sizes, dtype)
        assert verdict is not None
        yield Checked(
            key=key,
            family=family,
            backend=backend,
            device_model=model,
            dtype=verdict.dtype,
            ok=verdict.ok,
            forward_error=verdict.forward_error,
            gradient_error=verdict.gradient_error,
            tolerance=verdict.tolerance,
            worst=verdict.worst,
            versions=library_versions(),
        )
        require(family, backend, request.device, sizes, dtype)


def _train(request: TrialRequest, backends: dict[str, str]) -> Generator[Event, None, bool]:
    """Train and score a population; True if it was stopped early."""
    task = request.task
    population = Population(
        request.arch,
        request.vocab_size,
        members_of(request.train),
        request.train,
        request.seed,
        request.device,
        backends,
        execution=request.execution,
        together=members_together(request.arch, task, request.train, request.device, backends),
    )
    groups = tuple(len(group.indices) for group in population.groups)
    selection = generate(task, "selection", request.device)
    rungs: list[Rung] = []
    with _checkpoint(request) as checkpoint:
        draw = partial(generate, task, "train", request.device)
        redraw = draw if request.train.data == "fresh" else None
        for rung in population.train(draw(), selection, checkpoint.load(), redraw):
            rungs.append(rung)
            yield rung
            decision = request.decide(rung)
            if not decision.goes_on:
                yield Stopped(rung=rung.rung, reason=decision.reason)
                return True
            checkpoint.keep(population)
    report = population.recall(generate(task, "report", request.device))
    members = _members(population, rungs[-1], report)
    evaluation = _evaluation(request, members, tuple(rungs), backends, groups)
    best = max(
        (index for index, one in enumerate(members) if _is_chosen(one, evaluation)),
        key=lambda index: (members[index].selection_recall, -members[index].seed),
    )
    yield Evaluated(evaluation=evaluation, weights=save(population.weights(best)))
    return False


@contextmanager
def _checkpoint(request: TrialRequest) -> Iterator[Checkpoint]:
    """A file for the progress of training. It stays behind if the process or the machine is lost,
    for the next attempt, and goes when training has ended, well or by a fault of its own."""
    name = f"{request.arch.arch_hash}-{request.recipe_hash}"
    folder = Path(request.checkpoints) if request.checkpoints is not None else None
    checkpoint = Checkpoint(folder, name)
    try:
        yield checkpoint
    except OSError:
        raise  # the machine's fault
    except Exception:
        checkpoint.remove()
        raise
    checkpoint.remove()


def _members(
    population: Population, last: Rung, report: Sequence[Mapping[str, float]]
) -> tuple[MemberResult, ...]:
    return tuple(
        MemberResult(
            learning_rate=member.learning_rate,
            seed=member.seed,
            diverged=loss is None,
            train_loss=loss,
            selection_recall=selected,
            report_recall=_mean(list(by_segment.values())),
            report_by_segment=dict(by_segment),
        )
        for member, loss, selected, by_segment in zip(
            population.members, last.train_loss, last.selection_recall, report, strict=True
        )
    )


def _evaluation(
    request: TrialRequest,
    members: tuple[MemberResult, ...],
    rungs: tuple[Rung, ...],
    backends: dict[str, str],
    groups: tuple[int, ...],
) -> Evaluation:
    rate = chosen_rate(members)
    chosen = [member for member in members if member.learning_rate == rate]
    recalls = [member.report_recall for member in chosen]
    return Evaluation(
        arch_hash=request.arch.arch_hash,
        recipe_hash=request.recipe_hash,
        members=members,
        rungs=rungs,
        learning_rate=rate,
        recall=_mean(recalls),
        recall_spread=max(recalls) - min(recalls),
        recall_by_pairs=_by(request.task, chosen, "pairs"),
        recall_by_length=_by(request.task, chosen, "length"),
        diverged_members=sum(member.diverged for member in members),
        train_seconds=rungs[-1].seconds,
        groups=groups,
        kernel_backends=backends,
        versions={
            "archsearch": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def chosen_rate(members: Sequence[MemberResult]) -> float:
    """Learning rate with the best mean recall over its seeds on the selection split.

    Diverged members count with the recall 0 that they have. Of equals, the smaller rate.
    """

    def merit(rate: float) -> tuple[float, bool]:
        own = [member for member in members if member.learning_rate == rate]
        return _mean([one.selection_recall for one in own]), not all(one.diverged for one in own)

    return max(sorted({member.learning_rate for member in members}), key=merit)


def _is_chosen(member: MemberResult, evaluation: Evaluation) -> bool:
    return member.learning_rate == evaluation.learning_rate and not member.diverged


def _by(task: MqarSpec, members: Sequence[MemberResult], field: str) -> dict[int, float]:
    """Mean report recall of the members over the segments with one value of a field."""
    found: dict[int, list[float]] = {}
    for segment in task.test:
        recalls = [member.report_by_segment[segment.name] for member in members]
        found.setdefault(getattr(segment, field), []).extend(recalls)
    return {value: _mean(recalls) for value, recalls in sorted(found.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def _settings(request: TrialRequest) -> Iterator[None]:
    """Set torch's threads and matrix precision for the trial, and put them back after it."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(request.threads)
    torch.set_float32_matmul_precision("high" if request.train.precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _failed(error: BaseException) -> Failed:
    message = str(error) or repr(error)
    if not isinstance(error, ArchsearchError):
        message = f"{_where(error)}{type(error).__name__}: {error}"
    return Failed(
        failure=_class_of(error),
        message=message,
        traceback="".join(traceback.format_exception(error)),
    )


def _class_of(error: BaseException) -> FailureClass:
    """A plugin is the only code here that its author can mend, so it is what remains."""
    if _CPU_OUT_OF_MEMORY in str(error):
        return FailureClass.OUT_OF_MEMORY
    if isinstance(error, OSError) and _is_of_mixer(error):
        return FailureClass.PLUGIN_ERROR
    for kind, failure in _CLASSES:
        if isinstance(error, kind):
            return failure
    return FailureClass.PLUGIN_ERROR


def _is_of_mixer(error: BaseException) -> bool:
    """True if a mixer's own code raised it, not something that it called."""
    frames = [frame for frame, _line in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    files = {type(one).__module__ for one in owners if isinstance(one, Mixer | Mixer.Config)}
    is_method = isinstance(owners[-1], Mixer | Mixer.Config)
    return is_method or frames[-1].f_globals.get("__name__") in files


def _where(error: BaseException) -> str:
    """Name the innermost mixer code that the exception passed through, if it did."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Mixer | Mixer.Config):
            return f"in {type(owner).__qualname__}, line {line}: "
    return ""
