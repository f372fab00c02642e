"""Stored studies as JSON values and as aligned text: front, status, one trial.

The values are what `--json` prints and what MLflow keeps as `front.json`; the text is made from the
same records. Knows nothing of the command line or of where records come from.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from archsearch.arch import LayerSpec
from archsearch.display import architecture, axis_title, quantity, shown_metrics, written
from archsearch.front import confirmed, hypervolume_of, ranked
from archsearch.records import StudyRecord, TrialRecord, TrialState, losses, training_saved
from archsearch.spec import StudySpec
from archsearch.stopping import quality
from archsearch.units import format_duration

Json = dict[str, Any]

SHOWN = 3
"""Trials stopped early that `status` tells of, the last ones."""


def aligned(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table; columns that hold only numbers and units are aligned to the right."""
    table = [list(headers), *(list(row) for row in rows)]
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() or cell in ("", "-") for cell in col[1:]) for col in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    ]
    return "\n".join(lines)


def front_values(study: StudyRecord, trials: Sequence[TrialRecord]) -> Json:
    """The Pareto front of a study, by state bytes."""
    members = [trial for trial, rank in ranked(study, trials) if rank == 0]
    return {
        "study": study.name,
        "objectives": [axis.model_dump(mode="json") for axis in study.spec.objectives],
        "device_model": study.device_model,
        "hypervolume": hypervolume_of(study, trials),
        "reference": study.reference,
        "front": [_member(study.spec, trial) for trial in members],
        "confirmed_front": [trial.number for trial in confirmed(study, trials)],
    }


def _member(spec: StudySpec, trial: TrialRecord) -> Json:
    return {
        "number": trial.number,
        "arch_hash": trial.arch.arch_hash,
        "architecture": architecture(spec, trial.arch),
        "metrics": trial.metrics,
        "recall_spread": trial.evaluation.recall_spread if trial.evaluation is not None else None,
        "confirmed": confirmation_values(trial),
    }


def confirmation_values(trial: TrialRecord) -> Json | None:
    """What fresh seeds recalled; None if there are none."""
    again = trial.confirmation
    if again is None:
        return None
    spread, seeds = again.recall_spread, len(again.members)
    return {"recall": again.recall, "recall_spread": spread, "seeds": seeds}


def front_text(study: StudyRecord, trials: Sequence[TrialRecord]) -> str:
    """The Pareto front as a table, with the hypervolume below it."""
    members = [trial for trial, rank in ranked(study, trials) if rank == 0]
    if not members:
        return f"The front of study '{study.name}' is empty: no complete trial within the limits."
    names = [name for name in shown_metrics(study.spec) if name in members[0].metrics]
    headers = ["trial", *(quantity(name).label for name in names), "architecture"]
    headers.insert(2, "spread")
    rows = [_front_row(study.spec, trial, names) for trial in members]
    again = [trial.confirmation for trial in members]
    if any(again):
        headers.insert(3, "confirmed")
        for row, one in zip(rows, again, strict=True):
            row.insert(3, written("recall", one.recall if one is not None else None))
    axes = ", ".join(
        f"{axis.direction} {axis_title(study.spec, axis.metric)}" for axis in study.spec.objectives
    )
    volume = written("hypervolume", hypervolume_of(study, trials))
    return (
        f"{aligned(headers, rows)}\n\n"
        f"{len(members)} of {sum(trial.feasible for trial in trials)} feasible trials are on the "
        f"front of '{study.name}' ({axes}); hypervolume {volume}" + _confirmed_text(study, trials)
    )


def _confirmed_text(study: StudyRecord, trials: Sequence[TrialRecord]) -> str:
    """Which trials are on the front by fresh seeds; nothing if none was trained with them."""
    front = ", ".join(str(trial.number) for trial in confirmed(study, trials))
    return f"\nThe confirmed front, by fresh seeds: trials {front}" if front else ""


def _front_row(spec: StudySpec, trial: TrialRecord, names: Sequence[str]) -> list[str]:
    row = [written(name, trial.metrics.get(name)) for name in names]
    seeds = trial.evaluation.recall_spread if trial.evaluation is not None else None
    return [
        str(trial.number),
        row[0],
        written("recall", seeds),
        *row[1:],
        architecture(spec, trial.arch),
    ]


def losses_text(trials: Sequence[TrialRecord]) -> str:
    """Why trials have no result: a line a reason, with the first trial's message; or nothing."""
    return "\n".join(
        f"{len(lost)} {reason}, such as trial {lost[0][0].number}: {lost[0][1]}"
        for reason, lost in losses(trials).items()
    )


def status_values(study: StudyRecord, trials: Sequence[TrialRecord]) -> Json:
    """Where a study stands."""
    counts = Counter(trial.state for trial in trials)
    stops = [trial for trial in trials if trial.state is TrialState.STOPPED]
    stops.sort(key=lambda trial: (trial.finished_at or trial.proposed_at, trial.number))
    return {
        "study": study.name,
        "identity": study.spec.identity,
        "coordinator": study.coordinator,
        "request": str(study.request) if study.request is not None else None,
        "stop_reason": study.stop_reason,
        "wanted": study.spec.search.trials,
        "trials": {str(state): counts[state] for state in TrialState},
        "training_saved": training_saved(study.spec, trials),
        "last_stopped": [{"number": one.number, "reason": one.message} for one in stops[-SHOWN:]],
        "front": sum(rank == 0 for _, rank in ranked(study, trials)),
        "hypervolume": hypervolume_of(study, trials),
        "seconds_run": study.seconds_run,
        "created_at": study.created_at.isoformat(),
    }


def budget_values(study: StudyRecord, trials: Sequence[TrialRecord]) -> Json:
    """What a study may spend, and what it has spent; None is no limit."""
    search = study.spec.search
    work = [one for one in trials if one.state.is_final and one.duplicate_of is None]
    evaluated = sum(one.state is not TrialState.INFEASIBLE for one in work)
    failed = sum(one.state is TrialState.FAILED for one in work)
    return {
        "study": study.name,
        "coordinator": study.coordinator,
        "trials": {"limit": search.trials, "spent": evaluated},
        "time_s": {"limit": search.time_s, "spent": study.seconds_run},
        "device_time_s": {"limit": search.device_time_s, "spent": study.device_seconds},
        "failures": {"limit": search.failures, "spent": failed},
        "parallel": study.spec.resources.parallel,
    }


def budget_text(values: Json) -> str:
    """The same as a table."""
    rows = []
    for name in ("trials", "time_s", "device_time_s", "failures"):
        is_time = name.endswith("_s")
        cells = [values[name]["spent"], values[name]["limit"]]
        said = [
            "none" if cell is None else format_duration(cell) if is_time else str(cell)
            for cell in cells
        ]
        rows.append([name.removesuffix("_s").replace("_", " "), *said])
    rows.append(["parallel", "", str(values["parallel"] or "as many as fit")])
    return aligned(["budget", "spent", "limit"], rows)


def status_text(rows: Sequence[Json]) -> str:
    """One line a study, from their `status_values`; below them, who was stopped early and why."""
    states = ["stopped", "failed", "duplicate", "infeasible", "pending"]
    headers = ["study", "complete", *states, "front"]
    table = [
        [
            row["study"],
            f"{row['trials']['complete']}/{row['wanted']}",
            *(str(row["trials"][state]) for state in states),
            str(row["front"]),
            written("hypervolume", row["hypervolume"]),
            format_duration(row["seconds_run"]),
            _standing(row),
        ]
        for row in rows
    ]
    stops = [line for row in rows if row["last_stopped"] for line in ("", *_stops(row))]
    return "\n".join([aligned([*headers, "hypervolume", "ran for", "state"], table), *stops])


def _stops(row: Json) -> list[str]:
    saved = f"which saved {row['training_saved']:.0%} of the training"
    said = f"study '{row['study']}': {row['trials']['stopped']} stopped early, {saved}; the last:"
    return [said, *(f"  trial {one['number']}: {one['reason']}" for one in row["last_stopped"])]


def _standing(row: Json) -> str:
    if row["coordinator"]:
        now = {None: "running", "pause": "paused", "stop": "stopping"}[row["request"]]
        return f"{now} ({row['coordinator']})"
    return f"ended: {row['stop_reason']}" if row["stop_reason"] else "not running"


def trial_values(study: StudyRecord, trial: TrialRecord, rank: int | None) -> Json:
    """Everything stored of one trial."""
    return {
        "study": study.name,
        "number": trial.number,
        "state": str(trial.state),
        "front_rank": rank,
        "feasible": trial.feasible,
        "arch_hash": trial.arch.arch_hash,
        "architecture": trial.arch.model_dump(mode="json"),
        "metrics": trial.metrics,
        "violations": list(trial.violations),
        "duplicate_of": trial.duplicate_of,
        "failure": str(trial.failure) if trial.failure is not None else None,
        "message": trial.message,
        "traceback": trial.traceback,
        "from_cache": trial.from_cache,
        "proposed_at": trial.proposed_at.isoformat(),
        "finished_at": trial.finished_at.isoformat() if trial.finished_at else None,
        "attempts": [
            {
                "attempt": attempt.attempt,
                "state": str(attempt.state),
                "node": attempt.node,
                "pid": attempt.pid,
                "device_model": attempt.device_model,
                "started_at": attempt.started_at.isoformat(),
                "finished_at": attempt.finished_at.isoformat() if attempt.finished_at else None,
                "device_seconds": attempt.device_seconds,
                "failure": str(attempt.failure) if attempt.failure is not None else None,
                "message": attempt.message,
                "traceback": attempt.traceback,
            }
            for attempt in trial.attempts
        ],
        "rungs": [rung.model_dump(mode="json") for rung in trial.rungs],
        "evaluation": trial.evaluation.model_dump(mode="json") if trial.evaluation else None,
        "confirmation": trial.confirmation.model_dump(mode="json") if trial.confirmation else None,
        "profile": trial.profile.model_dump(mode="json") if trial.profile else None,
        "weights": trial.weights_path,
    }


def with_fields(layer: LayerSpec) -> str:
    """A mixer with all its fields, such as `attention (heads 2, rope False)`."""
    fields = ", ".join(f"{name} {value}" for name, value in layer.fields.items())
    return f"{layer.mixer} ({fields})" if fields else layer.mixer


def trial_text(study: StudyRecord, trial: TrialRecord, rank: int | None) -> str:
    """One trial for people: architecture, numbers, and what happened to it."""
    place = {None: "no place in the ranking", 0: "on the front"}.get(rank, f"front rank {rank}")
    lines = [f"trial {trial.number} of '{study.name}': {trial.state}, {place}", ""]
    lines += [f"width {trial.arch.width}, channel mixer {trial.arch.channel_mixer.kind}"]
    for depth, layer in enumerate(trial.arch.layers):
        lines.append(f"layer {depth}: {with_fields(layer)}")
        lines += [f"  part {i}: {with_fields(part)}" for i, part in enumerate(layer.parts)]
    if trial.metrics:
        rows = [
            (quantity(name).label, written(name, value)) for name, value in trial.metrics.items()
        ]
        lines += ["", aligned(["metric", "value"], rows)]
    lines += _learned(trial)
    if trial.state is TrialState.STOPPED:
        lines += _climbed(study.spec, trial)
    if trial.duplicate_of is not None and not trial.message:
        lines += ["", f"The same architecture as trial {trial.duplicate_of}."]
    lines += ["", *trial.violations] if trial.violations else []
    if trial.failure is not None or trial.message:
        what = "stopped early" if trial.state is TrialState.STOPPED else trial.state
        lines += ["", f"{trial.failure or what}: {trial.message}"]
    lines += ["", trial.traceback.rstrip()] if trial.traceback else []
    for attempt in trial.attempts[:-1]:
        if attempt.failure is not None:
            said = f"{attempt.failure} {attempt.message}"
            lines.append(f"attempt {attempt.attempt} on {attempt.node}: {said}")
    return "\n".join(lines)


def _climbed(spec: StudySpec, trial: TrialRecord) -> list[str]:
    """Recall on the selection split at every rung that a stopped trial reached."""
    rows = [
        (
            f"{rung.rung + 1}",
            f"{rung.epoch:g}",
            written("recall", quality(spec.train.member_rates, rung.selection_recall)),
        )
        for rung in trial.rungs
    ]
    done = f"{trial.rungs[-1].epoch:g} of {spec.train.epochs} epochs" if trial.rungs else "nothing"
    return ["", aligned(["rung", "epoch", "recall"], rows), "", f"trained for {done}"]


def _learned(trial: TrialRecord) -> list[str]:
    """Recall by learning rate and seed, and by number of pairs."""
    evaluation = trial.evaluation
    if evaluation is None:
        return []
    seeds = sorted({member.seed for member in evaluation.members})
    rows = []
    for rate in sorted({member.learning_rate for member in evaluation.members}):
        cells = {
            member.seed: "diverged" if member.diverged else written("recall", member.report_recall)
            for member in evaluation.members
            if member.learning_rate == rate
        }
        chosen = "chosen" if rate == evaluation.learning_rate else ""
        rows.append([f"{rate:g}", *(cells.get(seed, "-") for seed in seeds), chosen])
    pairs = [
        (str(count), written("recall", recall))
        for count, recall in sorted(evaluation.recall_by_pairs.items())
    ]
    trained = "from an earlier study" if trial.from_cache else "trained"
    return [
        "",
        aligned(["learning rate", *(f"seed {seed}" for seed in seeds), ""], rows),
        "",
        aligned(["pairs", "recall"], pairs),
        "",
        f"{trained} for {format_duration(evaluation.train_seconds)}"
        + (f" on {trial.profile.device_model}" if trial.profile else ""),
        *_again(trial),
    ]


def _again(trial: TrialRecord) -> list[str]:
    values = confirmation_values(trial)
    if values is None:
        return []
    spread = written("recall", values["recall_spread"])
    said = f"recall {written('recall', values['recall'])}, spread {spread}"
    return [f"confirmed with {values['seeds']} fresh seeds: {said}"]
