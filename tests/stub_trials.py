"""Trials that only pretend: what workers run in the coordinator's tests and its benchmark.

A study's orders to its trials travel in the recipe's name, as JSON, because that reaches every
worker. Results are functions of the architecture alone, so that two studies of one seed agree.
Nothing here sleeps to wait for something: a trial that has to wait waits for a file lock.
"""

import fcntl
import hashlib
import json
import os
import platform
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archsearch.errors import FailureClass
from archsearch.messages import (
    Evaluated,
    Evaluation,
    Event,
    Failed,
    LatencyPoint,
    MemberResult,
    Profile,
    Profiled,
    Rung,
    Started,
    Stopped,
    TrialRequest,
)
from archsearch.model_spec import ModelSpec, Option, Slot
from archsearch.spec import (
    EarlyStopping,
    Limit,
    MqarSpec,
    Objective,
    ResourcesSpec,
    SearchSpec,
    Segment,
    StudySpec,
    TrackingSpec,
    TrainSpec,
)

FUNCTION = "stub_trials:run_stub"
DEVICE_MODEL = "pretended device"
_ORDERS = ["kill", "terminate", "leave", "raise", "import", "exhaust", "lose", "diverge", "nothing"]
SICK = "ARCHSEARCH_STUB_SICK"
"""Environment variable of a node on which every trial is lost."""
NAME = "ARCHSEARCH_STUB_NAME"
"""Environment variable that tells nodes of one machine apart."""
MODEL = "ARCHSEARCH_STUB_MODEL"
"""Environment variable with the device model of a node."""


def stub_study(folder: Path, name: str = "stub", orders: dict[str, Any] | None = None) -> StudySpec:
    """A small study of pretended trials, with its database and weights in `folder`.

    Orders: `jitter_s` (random duration), and by trial number `kill`, `raise`, `exhaust`, `lose`,
    `terminate`, `leave` (end the process), `import` (a module is missing, as long as there is a
    file `missing` in `folder`), `diverge`, `one_diverges`, `nothing` (just end), `infinite`, and
    `hold` (wait for the lock of the file `hold` in `folder`); `kill_once` and the like do it in the
    first attempt only, `kill_at_rung_once`
    after its second rung. `confirming` says how trials end when they are confirmed: `diverge`
    always, `kill` the first time. With `rungs`, a study of so many that stops trials early, of
    `trials`. With `timed`, the decode latency is an objective too.
    """
    told = {"folder": str(folder), **(orders or {})}
    window = Option(mixer="sliding_window", fields={"window": (4, 8, 16, 32, 64, 128)})
    linear = Option(mixer="linear_attention", fields={"feature_dim": (8, 16, 24, 32)})
    conv = Option(mixer="base_conv", fields={"kernel": (2, 3, 4)})
    segment = Segment(length=32, pairs=4, examples=8)
    return StudySpec(
        study=name,
        seed=7,
        model=ModelSpec(
            width=(32, 64), layers=(Slot(options=(conv, window)), Slot(options=(window, linear)))
        ),
        task=MqarSpec(recipe=json.dumps(told), vocab_size=64, train=(segment,), test=(segment,)),
        train=TrainSpec(
            learning_rates=(1e-3,),
            seeds=told.get("seeds", 1),
            epochs=1,
            batch_size=8,
            test_batch_size=8,
            rungs=told.get("rungs", 1),
        ),
        objectives=(
            Objective(metric="recall", direction="maximize"),
            Objective(metric="state_bytes", direction="minimize"),
            *([Objective(metric="decode_ms", direction="minimize")] if "timed" in told else []),
        ),
        limits=(Limit(metric="state_bytes", maximum=200_000),),
        search=SearchSpec(
            sampler="tpe",
            trials=told.get("trials", 6),
            early_stopping=EarlyStopping() if "rungs" in told else None,
        ),
        resources=ResourcesSpec(parallel=2, trial_timeout_s=60),
        tracking=TrackingSpec(
            storage=f"sqlite:///{folder}/archsearch.db", mlflow=None, weights=f"{folder}/weights"
        ),
    )


def changed(spec: StudySpec, part: str, **values: Any) -> StudySpec:
    """The study with other values in one of its sections."""
    section = getattr(spec, part).model_copy(update=values)
    return StudySpec.model_validate(spec.model_copy(update={part: section}).model_dump())


def run_stub(request: TrialRequest) -> Iterator[Event]:
    """What `archsearch.trial.run_trial` does, without training anything."""
    orders = json.loads(request.task.recipe)
    folder = Path(orders["folder"])
    attempt = _count_attempt(folder, request)
    node = os.environ.get(NAME, platform.node())
    yield Started(node=node, pid=os.getpid(), device_model=_model())
    if SICK in os.environ:
        yield from _misbehave("lose")
        return
    if request.number in orders.get("hold", []):
        _wait_for(folder / "hold")
    for order in _ORDERS:
        if order == "import" and not (folder / "missing").exists():
            continue
        once = attempt == 1 and request.number in orders.get(f"{order}_once", [])
        if once or request.number in orders.get(order, []):
            yield from _misbehave(order)
            return
    time.sleep(random.random() * orders.get("jitter_s", 0.0))
    rungs = _rungs(request)
    if request.train_wanted:
        for rung in rungs:
            yield rung
            decision = request.decide(rung)
            if not decision.goes_on:
                yield Stopped(rung=rung.rung, reason=decision.reason)
                return
            kills = orders.get("kill_at_rung_once", [])
            if attempt == 1 and rung.rung == 1 and request.number in kills:
                yield from _misbehave("kill")
        how = orders.get("confirming") if not request.profile_wanted else None
        if how == "diverge" or (how == "kill" and attempt == 2):  # the first was the search's own
            yield from _misbehave(how)
            return
        one_diverges = request.number in orders.get("one_diverges", [])
        evaluation = _evaluation(request, rungs, 1 if one_diverges else 0)
        yield Evaluated(evaluation=evaluation, weights=b"pretended weights")
    if not request.profile_wanted:
        return
    latency = float("inf") if request.number in orders.get("infinite", []) else 1.5
    yield Profiled(profile=_profile(request, latency))


def _model() -> str:
    return os.environ.get(MODEL, DEVICE_MODEL)


def pretend_cap(share: float) -> None:
    """Instead of `process.cap`: tell by the node's name which GPU is shared, and how."""
    os.environ[NAME] = f"GPU {os.environ['CUDA_VISIBLE_DEVICES']}, share {share:g}"


def _count_attempt(folder: Path, request: TrialRequest) -> int:
    """Leave a trace of every start, and return which one this is for its trial."""
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    trained = "trained" if request.train_wanted else "profiled"
    name = f"{request.study}.{request.number}"
    # Not by token: what Ray would start again by itself has the same one.
    (traces / f"{name}.{os.getpid()}-{time.time_ns()}.{request.arch.arch_hash}.{trained}").touch()
    return len(list(traces.glob(f"{name}.*")))


def _wait_for(path: Path) -> None:
    """Wait until whoever holds the lock of a file lets go of it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _misbehave(order: str) -> Iterator[Event]:
    if order in ("kill", "terminate"):
        os.kill(os.getpid(), signal.SIGKILL if order == "kill" else signal.SIGTERM)
        signal.pause()
    if order == "leave":
        os._exit(1)
    if order == "import":
        raise ImportError("as ordered")
    if order == "raise":
        raise ZeroDivisionError("as ordered")
    if order == "exhaust":
        raise MemoryError("as ordered")
    if order == "nothing":
        return
    failure = FailureClass.LOST if order == "lose" else FailureClass.DIVERGED
    yield Failed(failure=failure, message="as ordered")


def fresh_recall(arch_hash: str) -> float:
    """What fresh seeds pretend to recall: something else, mostly less."""
    return pretended_recall(arch_hash) * pretended_recall(f"{arch_hash} again")


def pretended_recall(arch_hash: str) -> float:
    """A recall from 0 to 1 that only the architecture decides."""
    return int(hashlib.sha256(arch_hash.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF


def _rungs(request: TrialRequest) -> tuple[Rung, ...]:
    """Recall rises evenly to what the architecture reaches in the end."""
    count, recall = request.train.rungs, pretended_recall(request.arch.arch_hash)
    members = len(request.train.member_rates)
    return tuple(
        Rung(
            rung=rung,
            step=rung + 1,
            epoch=(rung + 1) / count,
            seconds=0.1,
            train_loss=(0.5,) * members,
            selection_recall=(recall * (rung + 1) / count,) * members,
        )
        for rung in range(count)
    )


def _evaluation(request: TrialRequest, rungs: tuple[Rung, ...], diverged: int) -> Evaluation:
    pretended = pretended_recall if request.profile_wanted else fresh_recall
    recall = pretended(request.arch.arch_hash)
    members = tuple(
        MemberResult(
            learning_rate=1e-3,
            seed=seed,
            diverged=seed < diverged,
            train_loss=0.5 if seed >= diverged else None,
            selection_recall=recall,
            report_recall=recall,
            report_by_segment={"L32K4": recall},
        )
        for seed in range(request.train.seeds)
    )
    return Evaluation(
        arch_hash=request.arch.arch_hash,
        recipe_hash=request.recipe_hash,
        members=members,
        rungs=rungs,
        learning_rate=1e-3,
        recall=recall,
        recall_spread=0.0,
        recall_by_pairs={4: recall},
        recall_by_length={32: recall},
        diverged_members=diverged,
        train_seconds=0.1,
        kernel_backends={},
        versions={},
    )


def _profile(request: TrialRequest, latency_ms: float) -> Profile:
    def points(places: tuple[tuple[int, int], ...]) -> tuple[LatencyPoint, ...]:
        return tuple(
            LatencyPoint(batch=batch, context=context, median_ms=latency_ms, iqr_ms=0.0, repeats=1)
            for batch, context in places
        )

    return Profile(
        arch_hash=request.arch.arch_hash,
        device_model=_model(),
        exclusive=request.profile.exclusive,
        prefill=points(request.profile.prefill),
        decode=points(request.profile.decode),
        state_bytes={},
        peak_memory_bytes=1000,
        threads=request.threads,
    )
