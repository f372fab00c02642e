"""What a study measures, where, and what limits make of it."""

from pathlib import Path

import pytest
from samples import sample_evaluation
from stub_trials import stub_study

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.gate import gate
from archsearch.measures import (
    RULES,
    constraints,
    measured_metrics,
    measured_violations,
    profile_spec,
)
from archsearch.messages import LatencyPoint, Profile
from archsearch.spec import Limit, Objective, StudySpec

BASE = stub_study(Path("unused"))
ARCH = ArchSpec(width=32, layers=(LayerSpec(mixer="sliding_window", fields={"window": 8}),))
EVALUATION = sample_evaluation(ARCH, 0.5, 0.0)


def study(*axes: Objective | Limit) -> StudySpec:
    objectives = tuple(axis for axis in axes if isinstance(axis, Objective))
    limits = tuple(axis for axis in axes if isinstance(axis, Limit))
    return BASE.model_copy(update={"objectives": objectives, "limits": limits})


def minimize(metric: str, **place: int) -> Objective:
    return Objective.model_validate({"metric": metric, "direction": "minimize", **place})


def profiled(spec: StudySpec) -> Profile:
    """Every place of the study, with a latency that tells it: batch + context / 1000."""
    places = profile_spec(spec, exclusive=True)

    def points(pairs: tuple[tuple[int, int], ...]) -> tuple[LatencyPoint, ...]:
        return tuple(
            LatencyPoint(batch=b, context=c, median_ms=b + c / 1000, iqr_ms=0.0, repeats=1)
            for b, c in pairs
        )

    return Profile(
        arch_hash=ARCH.arch_hash,
        device_model="d",
        exclusive=True,
        prefill=points(places.prefill),
        decode=points(places.decode),
        state_bytes={},
        peak_memory_bytes=10,
        threads=1,
    )


def test_every_place_that_is_asked_for_is_measured_once() -> None:
    spec = study(
        minimize("decode_ms", batch=4, context=64),
        minimize("prefill_ms", context=16),
        minimize("state_bytes", context=128),
        Limit(metric="decode_ms", maximum=1.0, batch=8, context=64),
        Limit(metric="decode_ms", maximum=1.0, batch=4, context=64),
    )
    places = profile_spec(spec, exclusive=False)
    assert places.prefill == ((1, 16),)
    assert set(places.decode) == {(4, 64), (8, 64), (1, 32), (1, 128)}
    assert len(places.decode) == 4
    assert not places.exclusive


def test_latencies_are_recorded_even_if_nobody_asks() -> None:
    places = profile_spec(BASE, exclusive=True)
    assert places.prefill == places.decode == ((1, 32),)


def test_a_metric_is_taken_at_its_first_place() -> None:
    spec = study(
        minimize("decode_ms", batch=4, context=64),
        Limit(metric="decode_ms", maximum=1.0, batch=8, context=64),
    )
    metrics = measured_metrics(spec, EVALUATION, profiled(spec))
    assert metrics["decode_ms"] == 4.064
    assert metrics["prefill_ms"] == 1.032
    assert metrics["recall"] == EVALUATION.recall


def test_limits_are_looked_at_in_their_own_places() -> None:
    spec = study(
        minimize("decode_ms", batch=4, context=64),
        Limit(metric="decode_ms", maximum=5.0, batch=8, context=64),
        Limit(metric="decode_ms", maximum=5.0, batch=4, context=64),
    )
    said = measured_violations(spec, EVALUATION, profiled(spec))
    assert said == ("decode_ms at batch 8, context 64 is 8.064; the limit is 5",)
    signs = constraints(spec, ARCH, (EVALUATION, profiled(spec)))
    assert signs["limit0.decode_ms"] == pytest.approx(8.064 / 5 - 1)
    assert signs["limit1.decode_ms"] < 0


def test_constraints_are_always_the_whole_set() -> None:
    spec = study(
        minimize("recall"),
        Limit(metric="decode_ms", maximum=5.0),
        Limit(metric="state_bytes", maximum=1.0),
    )
    names = {"mixer_rules", "limit0.decode_ms", "limit1.state_bytes"}
    unknown = constraints(spec, ARCH, None)
    assert set(unknown) == names
    assert unknown["limit0.decode_ms"] == 0.0 < unknown["limit1.state_bytes"]
    ruled_out = LayerSpec(mixer="sliding_window", fields={"window": 8, "heads": 5})
    signs = constraints(spec, ArchSpec(width=32, layers=(ruled_out,)), None)
    assert set(signs) == names
    assert signs["mixer_rules"] == 1.0


def test_the_gate_knows_what_mixers_and_limits_exclude() -> None:
    spec = study(minimize("recall"), Limit(metric="state_bytes", maximum=1.0))
    limited = gate(ARCH, spec)
    assert not limited.is_open and limited.metrics["state_bytes"] > 1
    ruled_out = LayerSpec(mixer="sliding_window", fields={"window": 8, "heads": 5})
    ruled = gate(ArchSpec(width=32, layers=(ruled_out,)), spec)
    assert not ruled.is_open and ruled.metrics == {} and not ruled.error


def test_the_gate_survives_a_mixer_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from archsearch.registry import load_mixer

    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("by its author")

    monkeypatch.setattr(load_mixer("sliding_window").Config, "state_spec", broken)
    found = gate(ARCH, BASE)
    assert found.error == "ZeroDivisionError: by its author"
    assert "state_spec" in found.traceback or "broken" in found.traceback


def test_what_no_device_can_hold_is_excluded_before_it_is_built() -> None:
    spec = study(minimize("recall"))
    wide = LayerSpec(mixer="mamba", fields={"dt_rank": 1 << 20})
    found = gate(ArchSpec(width=1 << 16, layers=(wide,)), spec)
    assert found.violations == ("parameters would take 1.09TiB; no device holds more than 256GiB",)
    assert found.constraints[RULES] > 0 and not found.error
    assert gate(ArchSpec(width=1 << 10, layers=(wide,)), spec).is_open
