"""How metrics are called and written for people: labels, units, a few significant digits.

The one home of names and formats for the terminal, the report, its picture and MLflow's notes.
Knows nothing of where the numbers come from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.spec import PLACED, EarlyStopping, MqarSpec, StudySpec, TrainSpec
from archsearch.units import format_bytes, format_count, format_duration

Kind = Literal["fraction", "bytes", "ms", "count", "seconds", "number"]


@dataclass(frozen=True)
class Quantity:
    """What a metric is: its name for people, the kind of number, and whether more is better."""

    label: str
    kind: Kind
    more_is_better: bool = False


QUANTITIES: Mapping[str, Quantity] = {
    "recall": Quantity("recall", "fraction", more_is_better=True),
    "recall_spread": Quantity("spread over seeds", "fraction"),
    "state_bytes": Quantity("state", "bytes"),
    "decode_ms": Quantity("decode latency", "ms"),
    "prefill_ms": Quantity("prefill latency", "ms"),
    "parameters": Quantity("parameters", "count"),
    "flops_per_token": Quantity("FLOPs per token", "count"),
    "peak_memory_bytes": Quantity("peak memory", "bytes"),
    "train_seconds": Quantity("training time", "seconds"),
    "hypervolume": Quantity("hypervolume", "fraction", more_is_better=True),
}


def quantity(metric: str) -> Quantity:
    """What is known of a metric; one that is not listed is a plain number under its own name."""
    return QUANTITIES.get(metric, Quantity(metric, "number"))


def written(metric: str, value: float | None) -> str:
    """Write a metric's value with its unit, such as `0.984`, `12.5KiB`, `0.53ms`, `1.2M`."""
    if value is None or not math.isfinite(value):
        return "-"
    kind = quantity(metric).kind
    if kind == "fraction":
        return f"{value:.3f}"
    if kind == "bytes":
        return format_bytes(round(value))
    if kind == "ms":
        return f"{_digits(value)}ms"
    if kind == "seconds":
        return format_duration(value)
    if kind == "count":
        return format_count(round(value))
    return _digits(value)


def _digits(value: float) -> str:
    """Three significant digits, without an exponent where that can be helped."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.15g}" if 1e-4 <= abs(rounded) < 1e15 else f"{rounded:g}"


def place(spec: StudySpec, metric: str) -> str:
    """Say where a study measures a metric, such as `context 64, batch 8`; empty if nowhere."""
    batch, context = spec.place(metric)
    said = {"context": f"context {context}", "batch": f"batch {batch}"}
    return ", ".join(said[name] for name in PLACED.get(metric, ()))


USUAL = ("state_bytes", "decode_ms", "parameters")
"""What a table shows besides a study's objectives."""


def shown_metrics(spec: StudySpec) -> tuple[str, ...]:
    """Metrics that a table of this study has: recall, the other objectives, the usual ones."""
    objectives = [objective.metric for objective in spec.objectives]
    return tuple(dict.fromkeys(["recall", *objectives, *USUAL]))


def axis_title(spec: StudySpec, metric: str) -> str:
    """Name a metric with the place it is measured at, such as `state (context 64)`."""
    where = place(spec, metric)
    return f"{quantity(metric).label} ({where})" if where else quantity(metric).label


def task_title(task: MqarSpec) -> str:
    """Name a task, such as `mqar, recipe tiny`; a plain prompt goes without saying."""
    prompt = "" if task.prompt == "plain" else f", prompt {task.prompt}"
    return f"{task.kind}, recipe {task.recipe}{prompt}"


def loss_title(train: TrainSpec) -> str:
    """What to add to a line on training: its loss, where that is not the next-token loss alone."""
    given = train.objective
    if given is None:
        return ""
    where = "" if given.prefix is None else f" of the first {given.prefix} tokens"
    return f", just_read_twice ({given.mask_share:g}{where} masked, weight {given.mask_weight:g})"


def stopping_title(rule: EarlyStopping | None) -> str:
    """Early stopping in a few words; an empty string if there is none."""
    if rule is None:
        return ""
    return f"one in {rule.reduction:g} goes on, from {rule.grace:.0%} of the training on"


def architecture(spec: StudySpec, arch: ArchSpec) -> str:
    """An architecture in one line with what the study searches, such as `base_conv > gated_delta
    (head_dim=16)`; fields that are the same in the whole study are left out."""
    searched = _searched(spec)
    line = " > ".join(_layer(layer, searched) for layer in arch.layers)
    return line + _around(spec, arch)


def brief(spec: StudySpec, arch: ArchSpec) -> str:
    """As `architecture`, without the layers that are the same in the whole study."""
    searched = _searched(spec)
    settled = spec.model.settled_slots
    fixed = {slot.options[0].mixer for slot in settled if len(slot.options) == 1}
    fixed -= {mixer for mixer, _ in searched} | {
        option.mixer for slot in settled for option in slot.options if option.parts and slot.is_open
    }
    layers = [_layer(layer, searched) for layer in arch.layers if layer.mixer not in fixed]
    return (" > ".join(layers) + _around(spec, arch)) if layers else architecture(spec, arch)


def _searched(spec: StudySpec) -> set[tuple[str, str]]:
    """(mixer, field) of everything that has more than one candidate."""
    return {
        (option.mixer, name)
        for option in spec.model.options
        for name, candidates in option.fields.items()
        if len(candidates) > 1
    }


def _layer(layer: LayerSpec, searched: set[tuple[str, str]]) -> str:
    shown = [
        f"{name}={value}" for name, value in layer.fields.items() if (layer.mixer, name) in searched
    ]
    shown[:0] = ["+".join(_layer(part, searched) for part in layer.parts)] if layer.parts else []
    return f"{layer.mixer}({', '.join(shown)})" if shown else layer.mixer


def _around(spec: StudySpec, arch: ArchSpec) -> str:
    """Width and channel mixer, where the study searches them."""
    text = f", width {arch.width}" if len(spec.model.width) > 1 else ""
    options = spec.model.channel_mixer
    if len(options) > 1 or len(options[0].ratio) > 1:
        text += f", {arch.channel_mixer.kind}"
        text += f" {arch.channel_mixer.ratio:g}" if arch.channel_mixer.ratio else ""
    return text
