"""The scatter of the report as a PNG, drawn with matplotlib's object interface.

Same families, colours, shapes and front line as the page. Uses no pyplot, hence no global state,
and may be called from any thread.
"""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from archsearch.display import axis_title, quantity, written
from archsearch.front import ranked
from archsearch.records import StudyRecord, TrialRecord
from archsearch.report.values import (
    by_finish,
    family,
    is_logarithmic,
    panel_metrics,
    spread,
    styles,
)
from archsearch.spec import StudySpec

_MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "down": "v",
    "plus": "P",
    "star": "*",
    "hexagon": "H",
}
_INK = "#1c2430"
_LIMIT = "#b3261e"


def png_report(study: StudyRecord, trials: Sequence[TrialRecord]) -> bytes:
    """Return the PNG of recall against state bytes and against latency (or what the study has)."""
    metrics = panel_metrics(study.spec, trials)[:2]
    figure = Figure(figsize=(12.0, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{study.name}: recall against cost", fontweight="bold", color=_INK)
    if not metrics:
        figure.text(0.5, 0.5, "no trial is complete yet", ha="center", color="#5c6675")
    ranks = {trial.number: rank for trial, rank in ranked(study, trials)}
    looks = styles(study.spec, trials)
    for column, metric in enumerate(metrics, start=1):
        axes = figure.add_subplot(1, len(metrics), column)
        drawn = [t for t in by_finish(trials) if metric in t.metrics and "recall" in t.metrics]
        _points(axes, study.spec, metric, drawn, ranks, looks)
        _staircase(axes, metric, drawn, ranks)
        _axes(axes, study.spec, metric, [t.metrics[metric] for t in drawn])
    if metrics:
        _legend(figure, study.spec, by_finish(trials), looks)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _points(
    axes: Axes,
    spec: StudySpec,
    metric: str,
    trials: Sequence[TrialRecord],
    ranks: Mapping[int, int],
    looks: Mapping[str, tuple[str, str]],
) -> None:
    # One call per look, not per trial: hundreds of artists take seconds.
    groups: dict[tuple[str, bool, bool], list[TrialRecord]] = defaultdict(list)
    for trial in trials:
        on = ranks.get(trial.number) == 0
        groups[family(spec, trial.arch), on, trial.feasible].append(trial)
    for (name, on, feasible), members in groups.items():
        colour, shape = looks[name]
        x = [trial.metrics[metric] for trial in members]
        y = [trial.metrics["recall"] for trial in members]
        axes.plot(
            x,
            y,
            marker=_MARKERS[shape],
            markersize=8.5 if on else 6.5,
            markerfacecolor=colour if feasible else "white",
            markeredgecolor="#111111" if on else colour,
            alpha=1.0 if on else 0.35,
            linestyle="none",
            zorder=4 if on else 2,
        )
        if on:
            seeds = [
                spread(trial) or (value, value) for trial, value in zip(members, y, strict=True)
            ]
            below = [max(0.0, value - low) for value, (low, _) in zip(y, seeds, strict=True)]
            above = [max(0.0, high - value) for value, (_, high) in zip(y, seeds, strict=True)]
            axes.errorbar(x, y, [below, above], color=colour, capsize=3, linestyle="none", zorder=3)


def _staircase(
    axes: Axes, metric: str, trials: Sequence[TrialRecord], ranks: Mapping[int, int]
) -> None:
    """Join the members that no other member beats on both axes, and go on to the costliest."""
    sign = -1.0 if quantity(metric).more_is_better else 1.0
    front = [trial for trial in trials if ranks.get(trial.number) == 0]
    places: list[tuple[float, float]] = []
    for trial in sorted(front, key=lambda t: (sign * t.metrics[metric], -t.metrics["recall"])):
        if not places or trial.metrics["recall"] > places[-1][1]:
            places.append((trial.metrics[metric], trial.metrics["recall"]))
    if places:
        end = sign * max(sign * trial.metrics[metric] for trial in trials)
        x, y = zip(*places, (end, places[-1][1]), strict=True)
        axes.step(x, y, where="post", color=_INK, alpha=0.75, linewidth=1.4, zorder=1)


def _axes(axes: Axes, spec: StudySpec, metric: str, values: Sequence[float]) -> None:
    if is_logarithmic(metric, values):
        axes.set_xscale("log", base=2 if quantity(metric).kind == "bytes" else 10)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(metric, value)))
    axes.set_xlabel(axis_title(spec, metric))
    axes.set_ylabel("recall")
    axes.set_ylim(top=1.02)
    axes.set_axisbelow(True)
    axes.grid(color="#e8ecf1")
    axes.spines[["top", "right"]].set_visible(False)
    limit = next((limit.maximum for limit in spec.limits if limit.metric == metric), None)
    if limit is not None and limit < 4 * max(values):
        end = max(axes.get_xlim()[1], limit * 1.1)
        axes.axvspan(limit, end, color=_LIMIT, alpha=0.08, linewidth=0)
        axes.axvline(limit, color=_LIMIT, linestyle="--", linewidth=1)
        axes.set_xlim(right=end)
    if len(set(values)) == 1:
        axes.xaxis.set_major_locator(FixedLocator(values[:1]))


def _legend(
    figure: Figure,
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    looks: Mapping[str, tuple[str, str]],
) -> None:
    used = {family(spec, trial.arch) for trial in trials}
    handles = [
        Line2D([], [], marker=_MARKERS[shape], color=colour, linestyle="none", label=name)
        for name, (colour, shape) in looks.items()
        if name in used
    ]
    handles.append(Line2D([], [], color=_INK, alpha=0.75, label="front"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
