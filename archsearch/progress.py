"""A running study on the terminal: a live block where there is one, plain lines elsewhere.

Both are observers of snapshots. Knows nothing of what makes them.
"""

import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from archsearch.display import quantity, written
from archsearch.snapshot import RunningTrial, Snapshot
from archsearch.units import format_duration

LONGEST_SILENCE_S = 60.0
"""Plain lines say at least this often that the study is alive."""
MOST_RUNNING = 8
"""Rows of running trials in the live block."""
BAR_WIDTH = 24


class Progress(Protocol):
    """An observer to be entered before the study and left after it."""

    def on_event(self, snapshot: Snapshot) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def make_progress(stream: TextIO) -> Progress:
    """The observer that suits a stream: live on a terminal, else plain lines.

    NO_COLOR and TERM=dumb are respected.
    """
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console)
    return PlainProgress(stream)


class PlainProgress:
    """One line when a trial has been evaluated or something is to be told, and a sign of life."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._evaluated = -1
        self._note = ""
        self._said_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def on_event(self, snapshot: Snapshot) -> None:
        if snapshot.note and snapshot.note != self._note:
            self._say(snapshot.note)
        self._note = snapshot.note
        silent_s = time.monotonic() - self._said_at
        if snapshot.evaluated != self._evaluated or silent_s >= LONGEST_SILENCE_S:
            self._evaluated = snapshot.evaluated
            self._say(status_line(snapshot))

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        print(text, file=self._stream, flush=True)


class LiveProgress:
    """A block that is redrawn in place; what is to be told scrolls by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._note = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_event(self, snapshot: Snapshot) -> None:
        if snapshot.note and snapshot.note != self._note:
            self._console.print(Text(snapshot.note))
        self._note = snapshot.note
        self._live.update(block(snapshot), refresh=True)


def status_line(snapshot: Snapshot) -> str:
    """A study at one moment in one line."""
    parts = [
        f"{snapshot.evaluated}/{snapshot.trials} trials",
        f"{len(snapshot.running)} running",
        *_left_out(snapshot),
    ]
    if snapshot.best:
        parts.append("best " + ", ".join(_best(snapshot)))
        parts.append(f"front {snapshot.front_size}")
        parts.append(f"hypervolume {written('hypervolume', snapshot.hypervolume)}")
    return "; ".join([*parts, _clock(snapshot)])


def _left_out(snapshot: Snapshot) -> list[str]:
    counts = {
        "stopped early": snapshot.stopped,
        "failed": snapshot.failed,
        "duplicate": snapshot.duplicate,
        "infeasible": snapshot.infeasible,
    }
    return [f"{count} {name}" for name, count in counts.items() if count]


def _best(snapshot: Snapshot) -> list[str]:
    return [
        f"{quantity(best.metric).label} {written(best.metric, best.value)} (#{best.number})"
        for best in snapshot.best
    ]


def _clock(snapshot: Snapshot) -> str:
    spent = format_duration(snapshot.seconds)
    if not snapshot.seconds_left:
        return spent
    return f"{spent}, about {format_duration(snapshot.seconds_left)} left"


def block(snapshot: Snapshot) -> Group:
    """The live block: bar, counts, best values, front, running trials. No line wraps."""
    cached = f" ({snapshot.from_cache} cached)" if snapshot.from_cache else ""
    done = [f"{snapshot.complete} complete{cached}", *_left_out(snapshot)]
    lines = [_fact("trials", ", ".join(done))]
    if snapshot.best:
        volume = written("hypervolume", snapshot.hypervolume)
        lines.append(_fact("best", ", ".join(_best(snapshot)), style="green"))
        lines.append(_fact("front", f"{snapshot.front_size} trials, hypervolume {volume}"))
    if snapshot.slots:
        lines.append(_fact("running", f"{len(snapshot.running)} of at most {snapshot.slots}"))
    return Group(_bar(snapshot), *lines, *_running(snapshot.running))


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _fact(name: str, text: str, style: str = "") -> Text:
    return _line((f"{name:<9}", "dim"), (text, style))


def _bar(snapshot: Snapshot) -> Text:
    full = round(BAR_WIDTH * min(1.0, snapshot.evaluated / max(1, snapshot.trials)))
    return _line(
        (snapshot.study, "bold"),
        "  ",
        ("━" * full, "green"),
        ("─" * (BAR_WIDTH - full), "dim"),
        f"  {snapshot.evaluated}/{snapshot.trials} trials  ",
        (_clock(snapshot), "dim"),
    )


def _running(trials: tuple[RunningTrial, ...]) -> list[Text]:
    lines = [
        _line(
            (f"{f'#{trial.number}':>7}", "cyan"),
            f"  {format_duration(trial.seconds):>7}  ",
            (f"{_stage(trial):<13}", "dim"),
            f"  {trial.summary}",
        )
        for trial in trials[:MOST_RUNNING]
    ]
    if len(trials) > MOST_RUNNING:
        lines.append(_line((f"{'':>9}and {len(trials) - MOST_RUNNING} more", "dim")))
    return lines


def _stage(trial: RunningTrial) -> str:
    again = f"try {trial.attempt}, " if trial.attempt > 1 else ""
    if not trial.worker:
        return f"{again}starting"
    if trial.best_recall is None:
        return f"{again}training"
    return f"{again}recall {written('recall', trial.best_recall)}"
