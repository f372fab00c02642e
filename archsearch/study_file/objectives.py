"""The `objectives` and `limits` sections of a study: what is optimised, and what is out of bounds.

One table says of every metric which direction makes sense, where it is measured and how its values
are written. Knows nothing of architectures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from archsearch.errors import nearest
from archsearch.pareto import MAX_OBJECTIVES
from archsearch.spec import PLACED, Limit, Metric, Objective
from archsearch.study_file.grammar import (
    Cursor,
    Key,
    Kind,
    Rejected,
    Schema,
    byte_count,
    check_keys,
    number,
    section,
    whole,
)

_COUNT: Kind[Any] = whole(0)
_BYTES: Kind[Any] = byte_count(0)
_MILLISECONDS: Kind[Any] = number("a number of milliseconds, such as 5", minimum=0)
_FRACTION: Kind[Any] = number("a number from 0 to below 1", minimum=0, below=1)
_PLACES = (
    Key("context", whole(1, 1 << 30), "Tokens of context; the longest test sequence by default."),
    Key("batch", whole(1, 1 << 20), "Sequences at once; 1 by default."),
)


@dataclass(frozen=True)
class Rule:
    """What a study may say of a metric."""

    metric: Metric
    doc: str
    quantity: Kind[Any]
    best: Literal["minimize", "maximize"] = "minimize"

    @property
    def place_keys(self) -> tuple[Key, ...]:
        return tuple(key for key in _PLACES if key.name in PLACED[self.metric])


_RULES = (
    Rule("recall", "Recall on the report split, 0 to 1.", _FRACTION, best="maximize"),
    Rule("state_bytes", "Bytes that decoding one sequence keeps.", _BYTES),
    Rule("decode_ms", "Time of one decoding step.", _MILLISECONDS),
    Rule("prefill_ms", "Time to read a whole context.", _MILLISECONDS),
    Rule("parameters", "Trained parameters, the tied embedding once.", _COUNT),
    Rule("flops_per_token", "Forward FLOPs, multiply-add = 2.", _COUNT),
    Rule("peak_memory_bytes", "Largest memory while decoding.", _BYTES),
)
RULES: Mapping[Metric, Rule] = {rule.metric: rule for rule in _RULES}
"""Every metric; `recall` alone is worth more when larger."""

DEFAULT_OBJECTIVES = (
    Objective(metric="recall", direction="maximize"),
    Objective(metric="state_bytes", direction="minimize"),
)


def _objective_options(rule: Rule) -> Kind[dict[str, Any]]:
    reference = Key("reference", rule.quantity, "Worst value that the hypervolume counts.")
    return section((*rule.place_keys, reference))


def _limit_options(rule: Rule) -> Kind[dict[str, Any]]:
    return section(
        (Key("maximum", rule.quantity, "Largest value allowed.", required=True), *rule.place_keys)
    )


def _objectives_schema() -> Schema:
    properties = {}
    for metric, rule in RULES.items():
        spelled = {
            "type": "object",
            "properties": {rule.best: _objective_options(rule).schema},
            "required": [rule.best],
            "additionalProperties": False,
        }
        properties[metric] = {"description": rule.doc, "anyOf": [{"const": rule.best}, spelled]}
    return {
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": MAX_OBJECTIVES,
    }


def _limits_schema() -> Schema:
    properties = {
        metric: {
            "description": f"Upper bound. {rule.doc}",
            "anyOf": [rule.quantity.schema, _limit_options(rule).schema],
        }
        for metric, rule in RULES.items()
        if rule.best == "minimize"
    }
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _read_objectives(cursor: Cursor) -> tuple[Objective, ...]:
    if cursor.value is None:
        return DEFAULT_OBJECTIVES
    if not isinstance(cursor.value, dict):
        raise cursor.expected(_OBJECTIVES_ACCEPT)
    complete = check_keys(cursor, cursor.value, [*RULES])
    if not 1 <= len(cursor.value) <= MAX_OBJECTIVES:
        cursor.refuse(f"{len(cursor.value)} objectives; expected 1 to {MAX_OBJECTIVES} of them")
        complete = False
    found = []
    for metric, rule in RULES.items():
        if metric in cursor.value:
            try:
                found.append(_objective(cursor.at(metric), metric, rule))
            except Rejected:
                complete = False
    if not complete:
        raise Rejected
    return tuple(found)


def _objective(cursor: Cursor, metric: Metric, rule: Rule) -> Objective:
    value = cursor.value
    direction = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else value
    if direction in ("minimize", "maximize") and direction != rule.best:
        raise cursor.refuse(f"'{metric}' can only be {rule.best}d; found {direction}")
    if direction != rule.best:
        example = ", ".join(f"{key.name}: ..." for key in rule.place_keys) or "reference: ..."
        accepts = f"{rule.best}, or {{{rule.best}: {{{example}}}}}"
        raise cursor.expected(accepts, nearest(direction, (rule.best,)))
    options: dict[str, Any] = {}
    if isinstance(value, dict):
        options = _objective_options(rule).read(cursor.at(rule.best))
    return Objective.model_validate({"metric": metric, "direction": rule.best, **options})


def _read_limits(cursor: Cursor) -> tuple[Limit, ...]:
    if cursor.value is None:
        return ()
    if not isinstance(cursor.value, dict):
        raise cursor.expected(_LIMITS_ACCEPT)
    complete = check_keys(cursor, cursor.value, [*RULES])
    found = []
    for metric, rule in RULES.items():
        if metric in cursor.value:
            try:
                found.append(_limit(cursor.at(metric), metric, rule))
            except Rejected:
                complete = False
    if not complete:
        raise Rejected
    return tuple(found)


def _limit(cursor: Cursor, metric: Metric, rule: Rule) -> Limit:
    if rule.best == "maximize":
        said = f"a limit is an upper bound, and more {metric} is better; leave it out"
        raise cursor.refuse(said, at_key=True)
    if isinstance(cursor.value, dict):
        options = _limit_options(rule).read(cursor)
    else:
        options = {"maximum": rule.quantity.read(cursor)}
    return Limit.model_validate({"metric": metric, **options})


_OBJECTIVES_ACCEPT = f"a mapping of 1 to {MAX_OBJECTIVES} metrics, such as {{recall: maximize}}"
_LIMITS_ACCEPT = "a mapping of metrics to upper bounds, such as {parameters: 2M}"
OBJECTIVES = Kind(_OBJECTIVES_ACCEPT, _objectives_schema(), _read_objectives)
LIMITS = Kind(_LIMITS_ACCEPT, _limits_schema(), _read_limits)


def placed(
    objectives: tuple[Objective, ...], limits: tuple[Limit, ...], longest: int
) -> tuple[tuple[Objective, ...], tuple[Limit, ...]]:
    """Fill in where each is measured: at `longest` and batch 1, a limit where its objective is."""
    filled = tuple(_place(objective, longest) for objective in objectives)
    by_metric = {objective.metric: objective for objective in filled}
    bounded = []
    for limit in limits:
        objective = by_metric.get(limit.metric)
        context = objective.context if objective and objective.context else longest
        batch = objective.batch if objective and objective.batch else 1
        bounded.append(_place(limit, context, batch))
    return filled, tuple(bounded)


_Axis = TypeVar("_Axis", Objective, Limit)


def _place(axis: _Axis, context: int, batch: int = 1) -> _Axis:
    places = {"context": axis.context or context, "batch": axis.batch or batch}
    return axis.model_copy(update={name: places[name] for name in PLACED[axis.metric]})
