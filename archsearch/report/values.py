"""What the report shows of a study, as plain JSON values: points, front, shares, failures.

Families colour the points: the family of an architecture is the mixer, among the layers that the
study searches, that keeps the most state. One that is made of mixers is named with them, in the
order of the alphabet. Knows nothing of HTML or drawing.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from archsearch.arch import NO_MIXER, ArchSpec, LayerSpec
from archsearch.cost import compute_dtype
from archsearch.display import (
    USUAL,
    architecture,
    axis_title,
    loss_title,
    place,
    quantity,
    shown_metrics,
    stopping_title,
    task_title,
    written,
)
from archsearch.errors import FOREIGN_FAULTS
from archsearch.front import hypervolume_of, ranked
from archsearch.messages import Evaluation
from archsearch.mixer import state_bytes
from archsearch.model_spec import Slot
from archsearch.records import StudyRecord, TrialRecord, TrialState, losses, training_saved
from archsearch.spec import StudySpec
from archsearch.units import format_duration

Json = dict[str, Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6F4E37", "#000000")
"""Distinct to colour-blind readers (Okabe and Ito, 2008); brown stands in for their yellow."""

SHAPES = ("circle", "square", "triangle", "diamond", "down", "plus", "star", "hexagon")
"""So that families can be told apart without colour."""


def families(spec: StudySpec) -> list[str]:
    """Every mixer a study can use, in the order the study file names them; searched ones first."""
    found: dict[str, None] = {}
    settled = spec.model.settled_slots
    in_order = sorted(
        spec.model.layer_slots,
        key=lambda slot: slot in settled and len(_slot_families(slot)) == 1,
    )
    for slot in in_order:
        found.update(dict.fromkeys(_slot_families(slot)))
    found.pop(NO_MIXER, None)
    return list(found)


def _slot_families(slot: Slot) -> list[str]:
    """Families in a slot: one for each option, or for each choice of the mixers it is made of."""
    return [
        _named(option.mixer, parts)
        for option in slot.options
        for parts in itertools.product(*([o.mixer for o in part.options] for part in option.parts))
    ]


def _named(mixer: str, parts: Iterable[str]) -> str:
    names = "+".join(sorted(parts))
    return f"{mixer}({names})" if names else mixer


def layer_family(layer: LayerSpec) -> str:
    """The family of one layer."""
    return _named(layer.mixer, (part.mixer for part in layer.parts))


def styles(spec: StudySpec, trials: Sequence[TrialRecord]) -> dict[str, tuple[str, str]]:
    """Colour and shape of every mixer of the study, the same for as long as its space is."""
    names = families(spec)
    used = {layer_family(layer) for trial in trials for layer in trial.arch.layers}
    names += sorted(used - set(names))
    return {
        # Shapes move on by one each time the colours begin again.
        name: (COLOURS[index % len(COLOURS)], SHAPES[(index + index // len(COLOURS)) % len(SHAPES)])
        for index, name in enumerate(names)
    }


def family(spec: StudySpec, arch: ArchSpec) -> str:
    """Name the mixer that says most about an architecture (see the module's first lines)."""
    kinds = [_slot_families(slot) for slot in spec.model.settled_slots]
    fixed = {names[0] for names in kinds if len(names) == 1}
    layers = [one for one in arch.layers if layer_family(one) not in fixed] or list(arch.layers)
    sizes = [_state_of(spec, arch.width, layer) for layer in layers]
    # The deepest wins a tie.
    return layer_family(layers[max(range(len(layers)), key=lambda depth: (sizes[depth], depth))])


def _state_of(spec: StudySpec, width: int, layer: LayerSpec) -> int:
    try:
        config = layer.config(width)
        return state_bytes(config, spec.task.longest, compute_dtype(spec.train.precision))
    except FOREIGN_FAULTS:
        return 0  # excluded or failed, so without a point in the picture; or its mixer is gone


def by_finish(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Complete trials in the order they finished."""
    done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return sorted(done, key=lambda trial: (trial.finished_at or trial.proposed_at, trial.number))


def hypervolume_history(
    study: StudyRecord, trials: Sequence[TrialRecord]
) -> list[tuple[int, float]]:
    """(complete trials so far, hypervolume) after each of them. Never falls.

    A trial that does not reach the front cannot change the volume, so only members are measured.
    """
    front: list[TrialRecord] = []
    history: list[tuple[int, float]] = []
    volume = 0.0
    for done, trial in enumerate(by_finish(trials), start=1):
        members = [member for member, rank in ranked(study, [*front, trial]) if rank == 0]
        if any(member is trial for member in members):
            front = members
            volume = hypervolume_of(study, front)
        history.append((done, volume))
    return history


def spread(trial: TrialRecord) -> tuple[float, float] | None:
    """Lowest and highest recall over the seeds at the chosen learning rate."""
    if trial.evaluation is None:
        return None
    recalls = [member.report_recall for member in trial.evaluation.chosen]
    return min(recalls), max(recalls)


def panel_metrics(spec: StudySpec, trials: Sequence[TrialRecord]) -> list[str]:
    """Metrics that recall can be drawn against: those some complete trial has, in a fixed order."""
    present = {name for trial in by_finish(trials) for name in trial.metrics}
    order = [*USUAL[:2], *(axis.metric for axis in spec.objectives), *sorted(present)]
    return [name for name in dict.fromkeys(order) if name in present and name != "recall"]


def is_logarithmic(metric: str, values: Sequence[float]) -> bool:
    """State is drawn on a logarithmic axis, other metrics where they span a factor of ten."""
    if not values or min(values) <= 0:
        return False
    return quantity(metric).kind == "bytes" or max(values) / min(values) >= 10


def page_values(study: StudyRecord, trials: Sequence[TrialRecord]) -> Json:
    """Everything the page shows. Every number is finite or None, every text is as stored."""
    spec = study.spec
    ranks = {trial.number: rank for trial, rank in ranked(study, trials)}
    panels = panel_metrics(spec, trials)
    values: Json = {
        "study": study.name,
        "headline": headline(study, trials, ranks),
        "families": [
            {"name": name, "colour": colour, "shape": shape}
            for name, (colour, shape) in styles(spec, trials).items()
        ],
        "panels": panels,
        "columns": [name for name in shown_metrics(spec) if name in ("recall", *panels)],
        "metrics": {name: _metric(spec, name, trials) for name in ["recall", *panels]},
        "trials": [_trial(spec, trial, ranks.get(trial.number)) for trial in trials],
        "hypervolume": hypervolume_history(study, trials),
        "shares": _shares(trials, ranks),
        "failures": _failures(spec, [one for one in trials if one.state is not TrialState.STOPPED]),
        "stopped": _failures(spec, [one for one in trials if one.state is TrialState.STOPPED]),
        "training_saved": training_saved(spec, trials),
        "settings": _settings(study),
        "spec": spec.model_dump(mode="json"),
    }
    finite: Json = _finite(values)
    return finite


def headline(
    study: StudyRecord, trials: Sequence[TrialRecord], ranks: dict[int, int]
) -> list[tuple[str, str]]:
    """(number, what it counts) pairs at the top of the page."""
    counts = Counter(trial.state for trial in trials)
    volume = hypervolume_of(study, trials)
    rows = [
        (str(sum(rank == 0 for rank in ranks.values())), "on the front"),
        (str(counts[TrialState.COMPLETE]), f"of {study.spec.search.trials} trials complete"),
        *(
            (str(counts[state]), "stopped early" if state is TrialState.STOPPED else str(state))
            for state in (
                TrialState.STOPPED,
                TrialState.FAILED,
                TrialState.INFEASIBLE,
                TrialState.DUPLICATE,
            )
            if counts[state]
        ),
        *([(str(counts[TrialState.PENDING]), "under way")] if counts[TrialState.PENDING] else []),
        (written("hypervolume", volume), "hypervolume"),
        (format_duration(study.seconds_run), "of search"),
    ]
    return rows


def _metric(spec: StudySpec, name: str, trials: Sequence[TrialRecord]) -> Json:
    values = [trial.metrics[name] for trial in by_finish(trials) if name in trial.metrics]
    objective = next((axis for axis in spec.objectives if axis.metric == name), None)
    limit = next((limit.maximum for limit in spec.limits if limit.metric == name), None)
    about = quantity(name)
    return {
        "label": about.label,
        "kind": about.kind,
        "place": place(spec, name),
        "objective": objective.direction if objective else None,
        "more_is_better": objective.direction == "maximize" if objective else about.more_is_better,
        "limit": limit,
        "log": is_logarithmic(name, values),
    }


def _trial(spec: StudySpec, trial: TrialRecord, rank: int | None) -> Json:
    complete = trial.state is TrialState.COMPLETE
    row: Json = {
        "number": trial.number,
        "state": str(trial.state),
        "rank": rank,
        "feasible": trial.feasible,
        "summary": architecture(spec, trial.arch),
        "family": family(spec, trial.arch),
        "metrics": trial.metrics if complete else {},
    }
    if complete:
        row["spread"] = spread(trial)
        if trial.confirmation is not None:
            row["confirmed"] = trial.confirmation.recall
        row["detail"] = _detail(spec, trial)
    return row


def _detail(spec: StudySpec, trial: TrialRecord) -> Json:
    evaluation = trial.evaluation
    detail: Json = {
        "width": trial.arch.width,
        "layers": [{"mixer": layer.label, "fields": _fields(layer)} for layer in trial.arch.layers],
        "hash": trial.arch.arch_hash,
        "violations": list(trial.violations),
        "device": trial.profile.device_model if trial.profile else None,
    }
    if trial.arch.channel_mixer.kind != "none":
        channel = trial.arch.channel_mixer
        detail["channel"] = f"{channel.kind}, ratio {channel.ratio:g}"
    if evaluation is not None:
        detail |= {
            "members": [
                [member.learning_rate, member.seed, member.report_recall, member.diverged]
                for member in evaluation.members
            ],
            "chosen": evaluation.learning_rate,
            "by_pairs": sorted(evaluation.recall_by_pairs.items()),
            "by_length": sorted(evaluation.recall_by_length.items()),
            "curves": curves(evaluation),
            "train_time": format_duration(evaluation.train_seconds),
        }
    return detail


def _fields(layer: LayerSpec) -> dict[str, str]:
    """All fields of a layer as text, those of its parts under their number and mixer."""
    found = {name: str(value) for name, value in layer.fields.items()}
    for i, part in enumerate(layer.parts):
        found |= {f"{i}.{part.mixer}.{name}": value for name, value in _fields(part).items()}
    return found


def curves(evaluation: Evaluation) -> list[tuple[float, list[tuple[float, float]]]]:
    """(learning rate, [(epoch, selection recall, mean over seeds)]) for every learning rate."""
    members: dict[float, list[int]] = defaultdict(list)
    for index, member in enumerate(evaluation.members):
        members[member.learning_rate].append(index)
    found = []
    for rate, indices in sorted(members.items()):
        points = [
            (rung.epoch, sum(rung.selection_recall[i] for i in indices) / len(indices))
            for rung in evaluation.rungs
            if len(rung.selection_recall) == len(evaluation.members)
        ]
        found.append((rate, points))
    return found


def _shares(trials: Sequence[TrialRecord], ranks: dict[int, int]) -> list[Json]:
    """Per layer in order of depth: how often each mixer is there, on and off the front."""
    layers: dict[int, dict[str, Counter[str]]] = defaultdict(
        lambda: {"on": Counter(), "off": Counter()}
    )
    for trial in trials:
        if trial.number in ranks:
            side = "on" if ranks[trial.number] == 0 else "off"
            for depth, layer in enumerate(trial.arch.layers):
                layers[depth][side][layer_family(layer)] += 1
    return [
        {"layer": depth, "on": dict(sides["on"]), "off": dict(sides["off"])}
        for depth, sides in sorted(layers.items())
    ]


def _failures(spec: StudySpec, trials: Sequence[TrialRecord]) -> list[Json]:
    return [
        {
            "reason": reason,
            "count": len(rows),
            "trials": [
                {
                    "number": trial.number,
                    "summary": architecture(spec, trial.arch),
                    "message": message,
                }
                for trial, message in rows
            ],
        }
        for reason, rows in losses(trials).items()
    ]


def _settings(study: StudyRecord) -> list[tuple[str, str]]:
    spec = study.spec
    train = spec.train
    rates = ", ".join(f"{rate:g}" for rate in train.learning_rates)
    objectives = [f"{axis.direction} {axis_title(spec, axis.metric)}" for axis in spec.objectives]
    limits = [f"{quantity(x.metric).label} <= {written(x.metric, x.maximum)}" for x in spec.limits]
    rows = [
        ("objectives", "; ".join(objectives)),
        ("limits", "; ".join(limits)),
        ("task", f"{task_title(spec.task)}, vocabulary {spec.task.vocab_size}"),
        (
            "training",
            f"{train.epochs} epochs, batch {train.batch_size}, {train.precision}"
            f"{loss_title(train)}",
        ),
        ("population", f"{train.population}: learning rates {rates}; {train.seeds} seeds"),
        ("search", f"{spec.search.sampler}, {spec.search.trials} trials, seed {spec.seed}"),
        ("early stopping", stopping_title(spec.search.early_stopping)),
        ("started", study.created_at.strftime("%Y-%m-%d %H:%M")),
        ("stopped by", study.stop_reason or "not yet"),
        ("identity", spec.identity),
    ]
    return [(name, text) for name, text in rows if text]


def _finite(value: Any) -> Any:
    """Copy of a JSON value with every number that JSON cannot hold replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
