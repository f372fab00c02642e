"""What a study would search, and what that costs, before anything is run or written."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from archsearch.compose import count, walk
from archsearch.display import axis_title, loss_title, quantity, stopping_title, task_title, written
from archsearch.gate import gate
from archsearch.model_spec import Block, Option, Piece, Ratio, Share, Slot
from archsearch.propose.corners import SMALL, sample
from archsearch.spec import KNOWN_BEFORE_TRAINING, StudySpec
from archsearch.units import format_bytes, format_duration

LOOKED_AT = 100
"""Architectures, evenly spaced by state, whose costs are worked out."""


def preview_values(spec: StudySpec) -> dict[str, Any]:
    """Size of the space, ranges of cost, budget and resources of a study."""
    by_size, ways = sample(spec), count(spec.model)
    task = spec.task
    step = max(1, math.ceil(len(by_size) / LOOKED_AT))
    looked = [gate(one.arch, spec) for one in {id(o): o for o in _few(by_size, step)}.values()]
    allowed = [one.metrics for one in looked if one.is_open]
    return {
        "study": spec.study,
        "identity": spec.identity,
        "space": {
            "ways_to_choose": ways,
            "architectures": sum(1 for _ in walk(spec.model)) if ways <= SMALL else None,
            "looked_at": len(looked),
            "within_limits": len(allowed),
        },
        "costs": {
            name: [min(values), max(values)]
            for name in KNOWN_BEFORE_TRAINING
            if (values := [row[name] for row in allowed])
        },
        "training": {
            "population": spec.train.population,
            "steps": _steps(spec),
            "data_bytes": 8 * sum(part.examples * task.length_of(part) for part in task.train),
        },
        "spec": spec.model_dump(mode="json"),
    }


def _few(items: list[Any], step: int) -> list[Any]:
    return items[::step] + items[-1:]


def _steps(spec: StudySpec) -> int:
    """Optimiser steps of one trial; each steps the whole population."""
    batches = sum(math.ceil(part.examples / spec.train.batch_size) for part in spec.task.train)
    return batches * spec.train.epochs


def preview_text(spec: StudySpec) -> str:
    """The same for people."""
    values = preview_values(spec)
    space, training, search = values["space"], values["training"], spec.search
    axes = [f"{axis.direction} {axis_title(spec, axis.metric)}" for axis in spec.objectives]
    limits = [f"{quantity(x.metric).label} <= {written(x.metric, x.maximum)}" for x in spec.limits]
    budget = f"{search.trials} trials"
    if search.time_s is not None:
        budget += f" or {format_duration(search.time_s)}"
    rates = ", ".join(f"{rate:g}" for rate in spec.train.learning_rates)
    rows = [
        ("study", f"{spec.study} (identity {spec.identity})"),
        ("layers", _layers(spec)),
        ("space", _size(space)),
        ("limits", "; ".join([*limits, _share(space)]) if limits else ""),
        *((quantity(name).label, _range(name, ends)) for name, ends in values["costs"].items()),
        ("objectives", "; ".join(axes)),
        ("task", task_title(spec.task)),
        ("population", f"{training['population']}: rates {rates}; {spec.train.seeds} seeds"),
        (
            "training",
            f"{training['steps']} steps of {spec.train.batch_size} a trial, "
            f"{spec.train.precision}, {format_bytes(training['data_bytes'])} of data"
            f"{loss_title(spec.train)}",
        ),
        ("search", f"{search.sampler}, {budget}, seed {spec.seed}"),
        ("early stopping", stopping_title(search.early_stopping)),
        ("one trial", _resources(spec)),
        ("storage", spec.tracking.storage),
        ("mlflow", spec.tracking.mlflow or "none"),
        ("weights", spec.tracking.weights),
    ]
    return "\n".join(f"{name:<17} {text}" for name, text in rows if text)


def _size(space: dict[str, int | None]) -> str:
    ways, distinct = space["ways_to_choose"], space["architectures"]
    said = f"{ways:,} ways to choose an architecture"
    return said if distinct in (None, ways) else f"{said}, {distinct:,} of them distinct"


def _share(space: dict[str, int]) -> str:
    return f"{space['within_limits']} of {space['looked_at']} architectures looked at are within"


def _range(name: str, ends: list[float]) -> str:
    low, high = (written(name, end) for end in ends)
    return low if low == high else f"{low} to {high}"


def _layers(spec: StudySpec) -> str:
    return _times(_stack(spec.model.layers), spec.model.repeat)


def _stack(pieces: Sequence[Piece]) -> str:
    return " > ".join(map(_piece, pieces))


def _piece(piece: Piece) -> str:
    if isinstance(piece, Block):
        return _times(_stack(piece.layers), piece.repeat)
    if isinstance(piece, Ratio):
        shares = [f"{_slot(part.layer)} {_shares(part)}" for part in piece.mix]
        return f"({'; '.join(shares)}; rest {_slot(piece.rest)}) x {_either(piece.of)}"
    return _slot(piece)


def _times(stack: str, repeat: tuple[int, ...]) -> str:
    return stack if repeat == (1,) else f"({stack}) x {_either(repeat)}"


def _shares(part: Share) -> str:
    places = f" {_either(part.place)}" if set(part.share) - {0, 1} else ""
    return _either([Fraction(share).limit_denominator(10_000) for share in part.share]) + places


def _either(values: Sequence[object]) -> str:
    """Write `1`, `1 or 2`, `1, 2 or 4`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _slot(slot: Slot) -> str:
    names = [_option(option) for option in slot.options]
    return names[0] if len(names) == 1 else f"({' | '.join(names)})"


def _option(option: Option) -> str:
    parts = "+".join(map(_slot, option.parts))
    return f"{option.mixer}({parts})" if parts else option.mixer


def _resources(spec: StudySpec) -> str:
    asked = spec.resources
    parts = [f"{asked.cpus} CPUs"]
    if asked.gpus:
        parts.append(f"{asked.gpus:g} GPUs")
    if asked.device:
        parts.append(asked.device)
    parts.append(f"at most {format_duration(asked.trial_timeout_s)}")
    parallel = f"{asked.parallel} at once" if asked.parallel else "as many at once as fit"
    return ", ".join(parts) + f"; {parallel}"
