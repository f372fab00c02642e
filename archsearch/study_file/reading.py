"""A study's YAML file becomes a StudySpec; every problem is found, with its line.

The keys at the top of a study, its small sections, its plugin files, and the order in which all
is read. Writes nothing anywhere.
"""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

from archsearch.architectures import architecture_names
from archsearch.errors import PluginError, SpecError, nearest
from archsearch.messages import PluginFile
from archsearch.registry import add_plugin_file, forget_plugin_file, mixer_fields
from archsearch.spec import (
    CORNERS,
    EarlyStopping,
    Execution,
    ResourcesSpec,
    SearchSpec,
    StudySpec,
    StudyStart,
    TrackingSpec,
)
from archsearch.stopping import why_never
from archsearch.study_file.checks import excluded
from archsearch.study_file.grammar import (
    NONE,
    Cursor,
    Key,
    Kind,
    Rejected,
    choice,
    duration,
    items,
    listing,
    number,
    or_none,
    scalar,
    section,
    text,
    whole,
)
from archsearch.study_file.model import MODEL, read_model
from archsearch.study_file.objectives import (
    DEFAULT_OBJECTIVES,
    LIMITS,
    OBJECTIVES,
    placed,
)
from archsearch.study_file.task import (
    TASK,
    TRAIN,
    read_task,
    recipe_of,
    too_long_prefix,
    train_over,
)
from archsearch.units import format_duration
from archsearch.yaml_file import Data, read_yaml

_MAX_GPUS = 1024


def _parse_gpus(value: Data) -> float:
    """A whole number of GPUs, or 1/k of one; 0.25 is 1/4, and 0.33 is not a fraction 1/k."""
    if isinstance(value, str):
        top, _, bottom = value.partition("/")
        if top.strip() != "1" or re.fullmatch(r"\s*[1-9][0-9]{0,2}", bottom) is None:
            raise ValueError
        value = float(Fraction(1, int(bottom)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    if 0 < value < 1 and abs(1 / value - round(1 / value)) > 1e-6:
        raise ValueError(f"one of {round(1 / value)} on a GPU is written 1/{round(1 / value)}")
    if not 0 <= value <= _MAX_GPUS or (value > 1 and not float(value).is_integer()):
        raise ValueError
    return float(value)


_GPUS = scalar(
    "a whole number of GPUs, or a part written 1/2, 1/3, ... or 0.5",
    {
        "anyOf": [
            {"type": "number", "minimum": 0},
            {"type": "string", "pattern": r"^1\s*/\s*[1-9][0-9]{0,2}$"},
        ]
    },
    _parse_gpus,
)
_ANY_TEXT = text("text")
_SAMPLERS = get_args(SearchSpec.model_fields["sampler"].annotation)
_STARTS = (*CORNERS, *architecture_names())
_OF_STUDY = section(
    (
        Key("study", _ANY_TEXT, "Another study in the same database.", required=True),
        Key("trials", listing(whole(0)), "Its trials, by number; those of its front by default."),
    )
)
_START_ACCEPTS = f"one of {', '.join(_STARTS)}, or a mapping such as {{study: another-study}}"


def _read_start(cursor: Cursor) -> str | StudyStart:
    if isinstance(cursor.value, dict):
        return StudyStart.model_validate(_OF_STUDY.read(cursor))
    if not isinstance(cursor.value, str) or cursor.value not in _STARTS:
        raise cursor.expected(_START_ACCEPTS, nearest(cursor.value, _STARTS))
    return cursor.value


_START: Kind[str | StudyStart] = Kind(
    _START_ACCEPTS, {"anyOf": [{"enum": list(_STARTS)}, _OF_STUDY.schema]}, _read_start
)
_ASHA = "asha"
_RULE = EarlyStopping()
_STOPPING = section(
    (
        Key(
            "reduction",
            number("a number above 1", above=1),
            f"One in so many goes on. Default {_RULE.reduction:g}.",
        ),
        Key(
            "grace",
            number("a share of the training, from 0 to below 1", minimum=0, below=1),
            f"Share of the training before which no trial is stopped. Default {_RULE.grace:g}.",
        ),
    )
)
_STOPPING_ACCEPTS = f"{NONE}, {_ASHA}, or a mapping such as {{reduction: 3, grace: 0.25}}"


def _read_stopping(cursor: Cursor) -> EarlyStopping | None:
    if cursor.value == NONE:
        return None
    if cursor.value == _ASHA:
        return _RULE
    if not isinstance(cursor.value, dict):
        raise cursor.expected(_STOPPING_ACCEPTS, nearest(cursor.value, (NONE, _ASHA)))
    return EarlyStopping.model_validate(_STOPPING.read(cursor))


_SEARCH, _RESOURCES, _TRACKING = SearchSpec(), ResourcesSpec(), TrackingSpec()

SEARCH = section(
    (
        Key(
            "sampler", choice(_SAMPLERS), f"Who proposes architectures. Default {_SEARCH.sampler}."
        ),
        Key(
            "trials",
            whole(1, 10**7),
            f"Distinct architectures to evaluate. Default {_SEARCH.trials}.",
        ),
        Key("time", duration(), "Wall clock after which no trial starts.", field="time_s"),
        Key(
            "device_time",
            duration(),
            "Time of all trials together, times GPUs of each (or CPU cores), after which no trial "
            "starts.",
            field="device_time_s",
        ),
        Key("failures", whole(1, 10**7), "Failed trials after which no trial starts."),
        Key("warm_start", listing(_START), "Architectures to begin with."),
        Key(
            "early_stopping",
            Kind(
                _STOPPING_ACCEPTS,
                {"anyOf": [{"enum": [NONE, _ASHA]}, {**_STOPPING.schema, "type": "object"}]},
                _read_stopping,
            ),
            f"Which trials are stopped before their training ends. Default {NONE}.",
        ),
        Key(
            "confirm",
            whole(0, 1024),
            "Fresh seeds that the front is trained with again in the end. "
            f"Default {_SEARCH.confirm}.",
        ),
    )
)
RESOURCES = section(
    (
        Key("gpus", _GPUS, f"GPUs of one trial, whole or 1/k. Default {_RESOURCES.gpus:g}."),
        Key("cpus", whole(1, 4096), f"CPU cores of one trial. Default {_RESOURCES.cpus}."),
        Key("device", _ANY_TEXT, "Device model that trials must run on, such as H200."),
        Key("parallel", whole(1, 10**6), "Trials at once; as many as fit by default."),
        Key(
            "trial_timeout",
            duration(),
            f"Longest trial. Default {format_duration(_RESOURCES.trial_timeout_s)}.",
            field="trial_timeout_s",
        ),
        Key(
            "attempts",
            whole(1, 1000),
            f"Tries at a trial whose worker is lost. Default {_RESOURCES.attempts}.",
        ),
        Key(
            "execution",
            choice(get_args(Execution)),
            "How training steps are launched; compiled on a GPU, eager on a CPU by default.",
        ),
    )
)
TRACKING = section(
    (
        Key(
            "storage",
            text(f"a database URL, such as {_TRACKING.storage}", r"^\w[\w+]*://"),
            f"Database of all results. Default {_TRACKING.storage}.",
        ),
        Key(
            "mlflow",
            or_none(text("an MLflow tracking URI")),
            f"MLflow tracking URI, or none. Default {_TRACKING.mlflow}.",
        ),
        Key(
            "weights",
            text("a folder"),
            "Where trained weights go, and the progress of long trials: workers that see the "
            f"folder go on with a lost trial from its last rung. Default {_TRACKING.weights}.",
        ),
    )
)


def _read_plugins(cursor: Cursor) -> tuple[str, ...]:
    """Register one-off mixer files; their paths are relative to the study's folder."""
    return items(cursor, _read_plugin, distinct=True)


def _read_plugin(cursor: Cursor) -> str:
    path = Path(cursor.document.source).parent / _ANY_TEXT.read(cursor)
    try:
        name = add_plugin_file(path)
    except (PluginError, OSError, ValueError) as error:
        raise cursor.refuse(str(error)) from error
    try:
        mixer_fields(name)
    except PluginError as error:
        forget_plugin_file(name)
        raise cursor.refuse(str(error)) from error
    return str(path.resolve())


_PLUGINS = listing(text("a path to one .py file"))
_STUDY_NAME = text(
    "a name of letters, digits, '-', '_' and '.', at most 64 of them",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
)

STUDY = section(
    (
        Key("study", _STUDY_NAME, "Name of the study.", required=True),
        Key("seed", whole(0, 2**32 - 1), "Seed of everything but the data. Default 0."),
        Key(
            "plugins",
            replace(_PLUGINS, read=_read_plugins),
            "One-off mixer files, relative to this file.",
        ),
        Key(
            "model",
            Kind(MODEL.accepts, MODEL.schema, read_model),
            "The architectures to search.",
            required=True,
        ),
        Key("task", Kind(TASK.accepts, TASK.schema, read_task), "What to learn.", required=True),
        Key("train", TRAIN, "How to train; the recipe's settings by default."),
        Key("objectives", OBJECTIVES, "One to four axes of the front."),
        Key("limits", LIMITS, "Upper bounds; an architecture above one is infeasible."),
        Key("search", SEARCH, "How the space is searched, and for how long."),
        Key("resources", RESOURCES, "What one trial asks of the machine."),
        Key("tracking", TRACKING, "Where results go."),
    )
)


def load_study(path: Path) -> StudySpec:
    """Read a study.

    Its plugin files are registered and imported; nothing is written.

    Raises:
        SpecError: every problem found, in the order of lines.
    """
    document = read_yaml(path)
    root = Cursor(document, (), document.data)
    try:
        spec = _assemble(root, STUDY.read(root))
        _check_prefix(root, spec)
        _check_limits(root, spec)
        _check_stopping(root, spec)
        _check_latency(root, spec)
    except Rejected:
        ordered = sorted(set(root.problems), key=lambda problem: (problem.line, problem.column))
        raise SpecError(document.source, ordered) from None
    return spec


def plugin_files(spec: StudySpec) -> tuple[PluginFile, ...]:
    """Read the study's one-off mixer files, as workers are sent them."""
    paths = [Path(path) for path in spec.plugins]
    return tuple(PluginFile(name=path.stem, source=path.read_text("utf-8")) for path in paths)


def _assemble(root: Cursor, given: dict[str, Any]) -> StudySpec:
    """Fill in everything that the file leaves out."""
    objectives, limits = placed(
        given.get("objectives", DEFAULT_OBJECTIVES), given.get("limits", ()), given["task"].longest
    )
    filled = {
        "train": train_over(recipe_of(root.at("task")), given.get("train", {})),
        "objectives": objectives,
        "limits": limits,
    }
    return StudySpec.model_validate({**given, **filled})


def _check_prefix(root: Cursor, spec: StudySpec) -> None:
    if said := too_long_prefix(spec.task, spec.train):
        raise root.refuse(said, "train", "objective", "just_read_twice", "prefix")


def _check_stopping(root: Cursor, spec: StudySpec) -> None:
    if said := why_never(spec):
        raise root.refuse(said, "search", "early_stopping")


def _check_latency(root: Cursor, spec: StudySpec) -> None:
    if spec.latencies and 0 < spec.resources.gpus < 1:
        name = spec.latencies[0]
        said = f"{name} cannot be measured on a GPU that others use meanwhile; expected 1 or more"
        raise root.refuse(said, "resources", "gpus")


def _check_limits(root: Cursor, spec: StudySpec) -> None:
    findings = excluded(spec)
    for finding in findings:
        if finding.metric is not None:
            root.refuse(finding.message, "limits", finding.metric)
        elif spec.limits:
            root.refuse(finding.message, "limits", at_key=True)
        else:
            root.refuse(finding.message, "model", "layers", at_key=True)
    if findings:
        raise Rejected
