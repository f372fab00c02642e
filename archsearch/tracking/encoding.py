"""A trial as flat text and numbers, for places that know no nesting: parameters, metrics, tags.

Charts of such places show only runs that have every chosen column, and draw numbers best. So each
trial of a study has the same parameters, with a sentinel (0, or `none` for text) where a layer or a
field is not there, and its architecture again as numbers under `arch/`. Knows nothing of MLflow.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from archsearch.arch import NO_MIXER, ArchSpec, LayerSpec
from archsearch.display import architecture, shown_metrics, written
from archsearch.errors import PluginError
from archsearch.messages import Evaluation, Profile, Rung
from archsearch.model_spec import Option, Slot
from archsearch.records import StudyRecord, TrialRecord, TrialState
from archsearch.registry import mixer_fields
from archsearch.spec import StudySpec

ABSENT = "none"
"""Value of a text parameter that an architecture does not have; a number is 0 then."""


@dataclass(frozen=True)
class Point:
    """One value of a metric. `step` is what the curve is drawn over."""

    key: str
    value: float
    step: int = 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sentinels(option: Option) -> dict[str, str]:
    """Field -> what stands for it where it is absent, for every field of a mixer."""
    try:
        declared = {name: field.default for name, field in mixer_fields(option.mixer).items()}
    except PluginError:
        declared = {}  # the mixer is gone; the study still knows what it searched
    listed = {name: values[0] for name, values in option.fields.items()}
    return {
        name: "0" if _is_number(value) else ABSENT for name, value in {**declared, **listed}.items()
    }


def _open_fields(options: list[Option]) -> dict[str, str]:
    """What stands for every field, of a mixer or of its parts, that some option has."""
    found: dict[str, str] = {}
    for option in options:
        found = _sentinels(option) | found
        # Parts are sorted, so that each may stand in every place.
        inner = [one for part in option.parts for one in part.options]
        for i in range(len(option.parts)):
            found |= {f"part{i}.mixer": ABSENT}
            found |= {f"part{i}.{name}": value for name, value in _open_fields(inner).items()}
    return found


def _given_fields(layer: LayerSpec) -> dict[str, str]:
    """The value of every field of a layer and of its parts."""
    found = {name: str(value) for name, value in layer.fields.items()}
    for i, part in enumerate(layer.parts):
        found[f"part{i}.mixer"] = part.mixer
        found |= {f"part{i}.{name}": value for name, value in _given_fields(part).items()}
    return found


def _options(spec: StudySpec, depth: int) -> list[Option]:
    """What can stand at a depth: the slot's options, or any slot's if layers may move."""
    slots = spec.model.layer_slots
    movable = any(not isinstance(piece, Slot) for piece in spec.model.layers)
    movable |= any(option.mixer == NO_MIXER for slot in slots for option in slot.options)
    at = slots if movable else (slots[depth % len(slots)],)
    return [option for slot in at for option in slot.options if option.mixer != NO_MIXER]


def parameters_of(spec: StudySpec, arch: ArchSpec) -> dict[str, str]:
    """Every decision as text, under the same names for all architectures of the study."""
    found = {
        "architecture": architecture(spec, arch),
        "width": str(arch.width),
        "depth": str(len(arch.layers)),
        "channel_mixer": arch.channel_mixer.kind,
        "channel_ratio": f"{arch.channel_mixer.ratio:g}",
    }
    deepest = max(spec.model.deepest, len(arch.layers))
    for depth in range(deepest):
        layer = arch.layers[depth] if depth < len(arch.layers) else None
        found[f"layer{depth}.mixer"] = layer.label if layer else ABSENT
        values = _open_fields(_options(spec, depth)) | (_given_fields(layer) if layer else {})
        found |= {f"layer{depth}.{name}": values[name] for name in sorted(values)}
    return found


def _numeric_fields(spec: StudySpec) -> dict[str, set[str]]:
    """Mixer -> fields that the study lists and whose candidates are numbers."""
    found: dict[str, set[str]] = {}
    for option in spec.model.options:
        if option.mixer != NO_MIXER:
            fields = found.setdefault(option.mixer, set())
            fields |= {k for k, values in option.fields.items() if all(map(_is_number, values))}
    return found


def encodings(spec: StudySpec, arch: ArchSpec) -> dict[str, float]:
    """The architecture as numbers: depth, width, layers per mixer, largest value per field.

    Parts of a layer are counted as layers are.
    """
    numbers = {
        "arch/depth": float(len(arch.layers)),
        "arch/width": float(arch.width),
        "arch/channel_ratio": arch.channel_mixer.ratio,
    }
    every = [one for layer in arch.layers for one in layer.nested]
    for mixer, fields in sorted(_numeric_fields(spec).items()):
        layers = [layer for layer in every if layer.mixer == mixer]
        numbers[f"arch/count/{mixer}"] = float(len(layers))
        for name in sorted(fields):
            values = [float(layer.fields[name]) for layer in layers if name in layer.fields]
            numbers[f"arch/{mixer}.{name}"] = max(values, default=0.0)
    return numbers


def points_of(spec: StudySpec, trial: TrialRecord) -> list[Point]:
    """Every number worth a chart; all finite."""
    numbers = encodings(spec, trial.arch) | trial.metrics
    points = [Point(key, value) for key, value in numbers.items()]
    if trial.evaluation is not None:
        points += _evaluation_points(trial.evaluation)
    elif trial.state is TrialState.STOPPED:
        points += _rung_points(spec.train.member_rates, trial.rungs)
    if trial.confirmation is not None:
        points.append(Point("recall_confirmed", trial.confirmation.recall))
        points.append(Point("recall_confirmed_spread", trial.confirmation.recall_spread))
    if trial.profile is not None:
        points += _profile_points(trial.profile, trial.metrics)
    return [point for point in points if math.isfinite(point.value)]


def _evaluation_points(evaluation: Evaluation) -> Iterator[Point]:
    yield Point("recall_spread", evaluation.recall_spread)
    yield Point("train_seconds", evaluation.train_seconds)
    yield Point("learning_rate", evaluation.learning_rate)
    yield Point("diverged_members", float(evaluation.diverged_members))
    for pairs, recall in sorted(evaluation.recall_by_pairs.items()):
        yield Point("recall_by_pairs", recall, pairs)
    for length, recall in sorted(evaluation.recall_by_length.items()):
        yield Point("recall_by_length", recall, length)
    yield from _rung_points([one.learning_rate for one in evaluation.members], evaluation.rungs)


def _rung_points(member_rates: Sequence[float], rungs: Sequence[Rung]) -> Iterator[Point]:
    """Learning curves: mean over the seeds of each learning rate."""
    for rung in rungs:
        for rate in sorted(set(member_rates)):
            members = [
                index
                for index, one in enumerate(member_rates)
                if one == rate and index < len(rung.selection_recall)
            ]
            losses = [loss for i in members if (loss := rung.train_loss[i]) is not None]
            recalls = [rung.selection_recall[i] for i in members]
            if recalls:
                yield Point(f"selection_recall/lr {rate:g}", _mean(recalls), rung.step)
            if losses:
                yield Point(f"train_loss/lr {rate:g}", _mean(losses), rung.step)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _profile_points(profile: Profile, known: Mapping[str, float]) -> Iterator[Point]:
    if "peak_memory_bytes" not in known:
        yield Point("peak_memory_bytes", float(profile.peak_memory_bytes))
    for kind, measured in (("prefill_ms", profile.prefill), ("decode_ms", profile.decode)):
        for point in measured:
            yield Point(f"{kind}/batch {point.batch} context {point.context}", point.median_ms)
    for context, held in sorted(profile.state_bytes.items()):
        yield Point("state_bytes_held", float(held), context)


def tags_of(trial: TrialRecord) -> dict[str, str]:
    """What a search filters by, besides the rank."""
    return {
        "feasible": _yes(trial.feasible),
        "state": str(trial.state),
        "arch_hash": trial.arch.arch_hash,
        "from_cache": _yes(trial.from_cache),
        "stop_reason": trial.message if trial.state is TrialState.STOPPED else ABSENT,
        "failure": str(trial.failure) if trial.failure is not None else ABSENT,
        "device_model": trial.profile.device_model if trial.profile is not None else ABSENT,
    }


def rank_tags(rank: int | None, is_confirmed: bool = False) -> dict[str, str]:
    """Tags of a trial's place: front 0 is the Pareto front; None has no place in the ranking."""
    return {
        "front": _yes(rank == 0),
        "front_rank": ABSENT if rank is None else str(rank),
        "confirmed_front": _yes(is_confirmed),
    }


def _yes(fact: bool) -> str:
    return "true" if fact else "false"


def trial_note(spec: StudySpec, trial: TrialRecord) -> str:
    """A few lines of Markdown on one trial."""
    lines = [f"Trial {trial.number} of `{trial.study}`: `{architecture(spec, trial.arch)}`"]
    numbers = [
        f"{name} {written(name, trial.metrics[name])}"
        for name in shown_metrics(spec)
        if name in trial.metrics
    ]
    lines += ["", ", ".join(numbers)] if trial.state is TrialState.COMPLETE else []
    reasons = [*trial.violations, *([trial.message] if trial.message else [])]
    lines += [line for reason in reasons for line in ("", reason)]
    return "\n".join(lines)


def study_note(study: StudyRecord) -> str:
    """A few lines of Markdown on how to browse a study."""
    return (
        f"Study `{study.name}`: one run a trial. Filter `tags.front = 'true'` for the Pareto "
        "front, `tags.confirmed_front = 'true'` for what is left of it with fresh seeds, "
        "`tags.state = 'complete'` for all results, `tags.state = 'stopped'` for trials that were "
        "stopped early (`stop_reason` says why). The run `summary` carries the "
        "interactive report (Artifacts, `report.html`) and the hypervolume."
    )
