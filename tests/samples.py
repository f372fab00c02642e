"""Made-up studies for tests that need stored results and no training.

Numbers are a smooth function of the architecture plus seeded noise, so that a front exists and
nothing depends on the machine.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.compose import draw
from archsearch.cost import state_bytes
from archsearch.errors import FailureClass
from archsearch.messages import Checked, Evaluation, LatencyPoint, MemberResult, Profile, Rung
from archsearch.model_spec import ModelSpec, Option, Slot
from archsearch.records import StudyRecord, TrialRecord, TrialState
from archsearch.spec import (
    Limit,
    MqarSpec,
    Objective,
    SearchSpec,
    Segment,
    StudySpec,
    TrackingSpec,
    TrainSpec,
)
from archsearch.store import Store
from archsearch.store.claim import claim
from archsearch.store.ledger import Ledger, NewTrial, Verdict
from archsearch.store.results import put_evaluation, put_profile

START = datetime(2026, 11, 30, 12, tzinfo=UTC)
CONTEXT, BATCH = 64, 8
RATES = (1e-3, 1e-2)


def sample_spec(name: str = "sample", trials: int = 24, folder: Path | None = None) -> StudySpec:
    searched = (
        Option(mixer="attention", fields={"heads": (1, 2)}),
        Option(mixer="sliding_window", fields={"window": (4, 8, 16, 32)}),
        Option(mixer="linear_attention", fields={"feature_dim": (4, 8, 12, 16, 20)}),
        Option(mixer="gated_delta", fields={"head_dim": (8, 16, 32), "heads": (1, 2)}),
    )
    places = {"storage": "archsearch.db", "mlflow": "mlflow.db"}
    urls = {key: f"sqlite:///{(folder or Path()) / file}" for key, file in places.items()}
    return StudySpec(
        study=name,
        model=ModelSpec(
            width=(32,), layers=(Slot(options=(Option(mixer="base_conv"),)), Slot(options=searched))
        ),
        task=MqarSpec(
            recipe="tiny",
            vocab_size=64,
            train=(Segment(length=32, pairs=4, examples=1000),),
            test=tuple(Segment(length=8 * k, pairs=k, examples=100) for k in (4, 8)),
        ),
        train=TrainSpec(
            learning_rates=RATES, seeds=2, epochs=8, batch_size=64, test_batch_size=64, rungs=4
        ),
        objectives=(
            Objective(metric="recall", direction="maximize"),
            Objective(metric="state_bytes", direction="minimize", context=CONTEXT),
            Objective(metric="decode_ms", direction="minimize", context=CONTEXT, batch=BATCH),
        ),
        limits=(Limit(metric="state_bytes", maximum=24 * 1024, context=CONTEXT),),
        search=SearchSpec(trials=trials),
        tracking=TrackingSpec(**urls),
    )


def sample_study(name: str = "sample", trials: int = 24, folder: Path | None = None) -> StudyRecord:
    return StudyRecord(
        name=name,
        spec=sample_spec(name, trials, folder),
        created_at=START,
        stop_reason="trials",
        coordinator=None,
        seconds_run=131.0,
        reference={"recall": 0.0, "state_bytes": 24 * 1024.0, "decode_ms": 1.0},
        device_model="sample device",
    )


def sample_trial(study: StudyRecord, number: int, arch: ArchSpec, state: TrialState) -> TrialRecord:
    """A trial of this state, with what such a trial has."""
    rng = random.Random(f"{arch.arch_hash}/{number}")
    proposed = START + timedelta(seconds=5 * number)
    held = float(state_bytes(arch, CONTEXT, torch.float32))
    trial = TrialRecord(
        study=study.name,
        number=number,
        state=state,
        arch=arch,
        params={"layer1.mixer": arch.layers[1].mixer},
        metrics={"state_bytes": held, "parameters": 5000.0 + held / 3, "flops_per_token": held * 5},
        violations=(),
        duplicate_of=None,
        failure=None,
        message="",
        traceback="",
        proposed_at=proposed,
        finished_at=proposed + timedelta(seconds=6) if state.is_final else None,
        from_cache=False,
    )
    if state is TrialState.COMPLETE:
        return _with_results(trial, rng, held)
    if state is TrialState.STOPPED:
        climbed = sample_evaluation(arch, 0.1, 0.0).rungs[:2]
        text = "recall 0.080 and its size took place 9 of 9 at rung 2 of 4, of which 3 go on"
        return replace(trial, message=text, rungs=climbed)
    if state is TrialState.FAILED:
        text = "every member reached a non-finite loss"
        return replace(trial, failure=FailureClass.DIVERGED, message=text, traceback="Traceback")
    if state is TrialState.INFEASIBLE:
        return replace(trial, violations=("state is 32KiB at context 64; the limit is 24KiB",))
    return trial


def _with_results(trial: TrialRecord, rng: random.Random, held: float) -> TrialRecord:
    recall = min(0.998, max(0.02, 1.15 - 900 / (held + 700) + rng.gauss(0, 0.04)))
    decode_ms = 0.2 * (1 + held / 30_000) * (1 + rng.random() / 4)
    evaluation = sample_evaluation(trial.arch, recall, abs(rng.gauss(0, 0.02)))
    point = LatencyPoint(batch=BATCH, context=CONTEXT, median_ms=decode_ms, iqr_ms=0.01, repeats=9)
    profile = Profile(
        arch_hash=trial.arch.arch_hash,
        device_model="sample device",
        exclusive=True,
        prefill=(point.model_copy(update={"median_ms": 6 * decode_ms}),),
        decode=(point,),
        state_bytes={CONTEXT: int(held)},
        peak_memory_bytes=10_000_000,
        threads=1,
    )
    measured = {"recall": evaluation.recall, "decode_ms": decode_ms, "prefill_ms": 6 * decode_ms}
    return replace(
        trial,
        metrics=trial.metrics | measured | {"peak_memory_bytes": 1e7},
        evaluation=evaluation,
        profile=profile,
        rungs=evaluation.rungs,
    )


def sample_evaluation(arch: ArchSpec, recall: float, spread: float) -> Evaluation:
    members = tuple(
        MemberResult(
            learning_rate=rate,
            seed=seed,
            diverged=False,
            train_loss=0.1,
            selection_recall=value,
            report_recall=value,
            report_by_segment={"L32K4": value, "L64K8": value * 0.9},
        )
        for rate in RATES
        for seed in (0, 1)
        for value in [
            min(1.0, max(0.0, recall * (1 if rate == 1e-2 else 0.8) + (seed - 0.5) * spread))
        ]
    )
    rungs = tuple(
        Rung(
            rung=k,
            step=50 * (k + 1),
            epoch=2.0 * (k + 1),
            seconds=k + 1.0,
            train_loss=(2 - 0.4 * k,) * 4,
            selection_recall=tuple(m.selection_recall * (1 - math.exp(-k - 0.5)) for m in members),
        )
        for k in range(4)
    )
    chosen = [member.report_recall for member in members if member.learning_rate == 1e-2]
    return Evaluation(
        arch_hash=arch.arch_hash,
        recipe_hash="sample",
        members=members,
        rungs=rungs,
        learning_rate=1e-2,
        recall=sum(chosen) / len(chosen),
        recall_spread=max(chosen) - min(chosen),
        recall_by_pairs={4: recall, 8: recall * 0.9},
        recall_by_length={32: recall, 64: recall * 0.9},
        diverged_members=0,
        train_seconds=4.2,
        kernel_backends={"attention": "reference"},
        versions={"torch": "2.13"},
    )


def sample_trials(study: StudyRecord, count: int, seed: int = 0) -> list[TrialRecord]:
    """Trials as a study has them: most complete, some failed, infeasible or duplicates."""
    rng = random.Random(seed)
    seen: dict[str, int] = {}
    trials = []
    for number in range(count):
        arch = draw(study.spec.model, rng).arch
        first = seen.setdefault(arch.arch_hash, number)
        state = TrialState.COMPLETE
        if number % 8 == 5:
            state = TrialState.FAILED
        elif number % 8 == 7:
            state = TrialState.INFEASIBLE
        elif first != number and trials[first].state is TrialState.COMPLETE:
            state = TrialState.DUPLICATE
        trial = sample_trial(study, number, arch, state)
        if state is TrialState.DUPLICATE:
            metrics = trials[first].metrics
            trial = replace(trial, duplicate_of=first, metrics=metrics)
        trials.append(trial)
    return trials


def with_mixer(trial: TrialRecord, mixer: str, fields: Mapping[str, str]) -> TrialRecord:
    """The same trial with a last layer of any name, as a mixer that is gone leaves it."""
    last = LayerSpec.model_construct(mixer=mixer, fields=dict(fields))
    arch = ArchSpec.model_construct(
        width=trial.arch.width,
        layers=(*trial.arch.layers[:-1], last),
        channel_mixer=trial.arch.channel_mixer,
    )
    return replace(trial, arch=arch)


def begin(store: Store, study: StudyRecord) -> Ledger:
    """Store a study without trials and hold it, as its coordinator does."""
    ledger = claim(store, study.spec, (), {})
    ledger.set_reference(study.reference)
    return ledger


def add(store: Store, ledger: Ledger, trials: Sequence[TrialRecord]) -> None:
    """Store trials as the coordinator does, with their results."""
    for trial in trials:
        new = NewTrial(
            number=trial.number,
            arch=trial.arch,
            params=trial.params,
            sampler_notes={},
            metrics=trial.metrics,
            duplicate_of=trial.duplicate_of,
        )
        ledger.add_trial(new)
        token = None
        if trial.state is TrialState.STOPPED:
            token = f"sample{trial.number}"
            ledger.start_attempt(trial.number, token)
            for rung in trial.rungs:
                ledger.add_rung(token, rung)
        if trial.state.is_final:
            ledger.finish(trial.number, _verdict(store, trial), token)


def _verdict(store: Store, trial: TrialRecord) -> Verdict:
    verdict = Verdict(
        state=trial.state,
        violations=trial.violations,
        failure=trial.failure,
        message=trial.message,
        traceback=trial.traceback,
    )
    if trial.evaluation is None or trial.profile is None:
        return verdict
    with store.database.writing() as connection:
        # One recipe a trial: equal architectures of a sample keep results of their own.
        evaluation = trial.evaluation.model_copy(update={"recipe_hash": f"sample{trial.number}"})
        return replace(
            verdict,
            evaluation_id=put_evaluation(connection, evaluation, "", ""),
            profile_id=put_profile(connection, trial.profile, f"sample{trial.number}"),
        )


def checked(ok: bool) -> Checked:
    """What a pretended check of a kernel found."""
    return Checked(
        key="right" if ok else "wrong",
        family="attention",
        backend="mine",
        device_model="pretended device",
        dtype="float32",
        ok=ok,
        forward_error=0.0 if ok else None,
        gradient_error=0.0,
        tolerance=1e-6,
        worst="output 0",
        versions={},
    )
