"""What a study measures: where latencies are taken, and how results become metrics and limits.

A metric is recorded once per trial, at the study's first place for it; limits are judged each at
its own. Knows no service.
"""

from collections.abc import Iterable

from archsearch.arch import ArchSpec
from archsearch.cost import known_metric
from archsearch.errors import InfeasibleError
from archsearch.messages import Evaluation, LatencyPoint, Profile, ProfileSpec
from archsearch.spec import MEASURED_AFTER_TRAINING, PLACED, Limit, Place, StudySpec

RULES = "mixer_rules"
"""Constraint for what mixers themselves, or all devices, exclude; beside the study's limits, always
set."""


def profile_spec(spec: StudySpec, exclusive: bool) -> ProfileSpec:
    """Every place that the study's objectives and limits ask for, and at least one of each kind.

    Args:
        exclusive: True if nothing else runs on the device while a trial is profiled.
    """
    prefill = [spec.place("prefill_ms")]
    decode = [spec.place("decode_ms"), spec.place("peak_memory_bytes")]
    decode.append((1, spec.place("state_bytes")[1]))
    for axis in spec.axes:
        if axis.metric == "prefill_ms":
            prefill.append(spec.place_of(axis))
        elif axis.metric in ("decode_ms", "peak_memory_bytes"):
            decode.append(spec.place_of(axis))
        elif axis.metric == "state_bytes":
            decode.append((1, spec.place_of(axis)[1]))
    return ProfileSpec(
        prefill=tuple(dict.fromkeys(prefill)),
        decode=tuple(dict.fromkeys(decode)),
        exclusive=exclusive,
    )


def measured_metrics(spec: StudySpec, evaluation: Evaluation, profile: Profile) -> dict[str, float]:
    """Metrics that cost a trial: recall, latencies, peak memory; milliseconds and bytes."""
    return {
        metric: _measured(metric, spec.place(metric), evaluation, profile)
        for metric in sorted(MEASURED_AFTER_TRAINING)
    }


def _measured(metric: str, place: Place, evaluation: Evaluation, profile: Profile) -> float:
    if metric == "recall":
        return evaluation.recall
    if metric == "peak_memory_bytes":
        return float(profile.peak_memory_bytes)
    points = profile.decode if metric == "decode_ms" else profile.prefill
    return _point(points, place).median_ms


def _point(points: Iterable[LatencyPoint], place: Place) -> LatencyPoint:
    found = next((point for point in points if (point.batch, point.context) == place), None)
    assert found is not None, f"the profile lacks batch {place[0]}, context {place[1]}"
    return found


def measured_violations(
    spec: StudySpec, evaluation: Evaluation, profile: Profile
) -> tuple[str, ...]:
    """Sentences for the limits on measured metrics that a trial breaks; empty if none."""
    found = []
    for limit in spec.limits:
        if limit.metric not in MEASURED_AFTER_TRAINING:
            continue
        place = spec.place_of(limit)
        value = _measured(limit.metric, place, evaluation, profile)
        if value > limit.maximum:
            where = f" at batch {place[0]}, context {place[1]}" if PLACED[limit.metric] else ""
            found.append(f"{limit.metric}{where} is {value:g}; the limit is {limit.maximum:g}")
    return tuple(found)


def constraints(
    spec: StudySpec, arch: ArchSpec, results: tuple[Evaluation, Profile] | None
) -> dict[str, float]:
    """One number for every limit, above 0 if it is broken, as a share of the limit.

    Always the whole set, because a sampler takes a missing constraint for a kept one. Limits on
    what is not known count as kept.
    """
    try:
        arch.configs()
    except InfeasibleError:
        return {RULES: 1.0} | {_name(i, limit): 0.0 for i, limit in enumerate(spec.limits)}
    found = {RULES: 0.0}
    for index, limit in enumerate(spec.limits):
        value = _limited(spec, arch, limit, results)
        scale = max(abs(limit.maximum), 1e-12)
        found[_name(index, limit)] = 0.0 if value is None else (value - limit.maximum) / scale
    return found


def _name(index: int, limit: Limit) -> str:
    return f"limit{index}.{limit.metric}"


def _limited(
    spec: StudySpec, arch: ArchSpec, limit: Limit, results: tuple[Evaluation, Profile] | None
) -> float | None:
    batch, context = spec.place_of(limit)
    if limit.metric not in MEASURED_AFTER_TRAINING:
        return known_metric(arch, spec, limit.metric, context)
    return _measured(limit.metric, (batch, context), *results) if results is not None else None
