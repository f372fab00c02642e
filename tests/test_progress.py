"""What a person sees of a running study: a live block on a terminal, plain lines elsewhere."""

import errno
import io
import os
import pty
import re
from dataclasses import replace

import pytest

from archsearch.progress import LiveProgress, PlainProgress, make_progress, status_line
from archsearch.snapshot import Best, RunningTrial, Snapshot

RUNNING = tuple(
    RunningTrial(
        number=number,
        attempt=1 + number // 9,
        summary="base_conv > gated_delta(head_dim=16)" * 4,
        worker="host pid 7",
        seconds=3.25 + number,
        rung=number,
        best_recall=0.5 if number else None,
    )
    for number in range(11)
)
SNAPSHOT = Snapshot(
    study="quickstart",
    trials=18,
    evaluated=6,
    complete=5,
    from_cache=1,
    failed=1,
    duplicate=2,
    infeasible=3,
    waiting=0,
    running=RUNNING,
    front_size=3,
    hypervolume=0.25,
    best=(Best("recall", 0.987, 4, "attention"), Best("state_bytes", 1536.0, 2, "base_conv")),
    seconds=61.0,
    seconds_left=125.0,
    slots=12,
)


def screen(snapshots: list[Snapshot], columns: int = 80) -> str:
    """Everything that is sent to a terminal of this width, escape sequences included."""
    ours, theirs = pty.openpty()
    os.environ["COLUMNS"], os.environ["LINES"] = str(columns), "30"
    try:
        with os.fdopen(theirs, "w") as stream, make_progress(stream) as progress:
            for snapshot in snapshots:
                progress.on_event(snapshot)
        return _to_the_end(ours).decode()
    finally:
        os.close(ours)
        del os.environ["COLUMNS"], os.environ["LINES"]


def _to_the_end(terminal: int) -> bytes:
    """All that was written. One read gives only what the kernel has passed on so far."""
    written = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # Linux: the other side is closed and nothing is left
                raise
            return written
        if not part:
            return written
        written += part


def plain(text: str) -> str:
    """The text alone, each drawing below the one before."""
    text = text.replace("\x1b[1A", "\n").replace("\r", "")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture(autouse=True)
def _colour_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_live_block_shows_counts_best_front_and_time_left() -> None:
    shown = plain(screen([SNAPSHOT]))
    for part in (
        "quickstart",
        "6/18 trials",
        "1m1s, about 2m5s left",
        "5 complete (1 cached), 1 failed, 2 duplicate, 3 infeasible",
        "recall 0.987 (#4), state 1.5KiB (#2)",
        "3 trials, hypervolume 0.250",
        "11 of at most 12",
        "#0    3.25s  training",
        "#1    4.25s  recall 0.500",
        "and 3 more",
    ):
        assert part in shown


def test_live_block_never_wraps() -> None:
    lines = plain(screen([SNAPSHOT], columns=60)).split("\n")
    assert max(map(len, lines)) <= 60
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("quickstart")) :]
    # Bar, four facts, eight trials, and how many more there are.
    assert len([line for line in last if line.strip()]) == 1 + 4 + 8 + 1


def test_live_block_is_drawn_in_place() -> None:
    """Moving up over the old block is what makes it one block and not a scroll."""
    assert "\x1b[1A" not in screen([]).split("\n")[0]
    assert screen([SNAPSHOT, SNAPSHOT]).count("\x1b[1A") >= 10


def test_notes_stay_above_the_block_and_are_said_once() -> None:
    noted = replace(SNAPSHOT, note="trial 3 was lost with its worker and goes again")
    assert screen([noted, noted, SNAPSHOT]).count("trial 3 was lost") == 1


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|38;[0-9;]*)m")
    assert colour.search(screen([SNAPSHOT]))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(screen([SNAPSHOT]))


def test_a_file_and_a_dumb_terminal_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress(io.StringIO()), PlainProgress)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        assert isinstance(make_progress(stream), LiveProgress)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(make_progress(stream), PlainProgress)
    os.close(ours)


def test_plain_lines_say_what_was_evaluated_and_nothing_else() -> None:
    stream = io.StringIO()
    again = replace(SNAPSHOT, seconds=62.0, duplicate=9, infeasible=9)
    more = replace(SNAPSHOT, evaluated=7, complete=6)
    with PlainProgress(stream) as progress:
        for snapshot in (SNAPSHOT, SNAPSHOT, again, more, more):
            progress.on_event(snapshot)
    lines = stream.getvalue().splitlines()
    assert [line.split(";")[0] for line in lines] == ["6/18 trials", "7/18 trials"]
    assert not any("\x1b" in line for line in lines)


def test_plain_lines_show_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archsearch.progress.LONGEST_SILENCE_S", 0.0)
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        progress.on_event(SNAPSHOT)
        progress.on_event(SNAPSHOT)
    assert len(stream.getvalue().splitlines()) == 2


def test_status_line_before_anything_is_known() -> None:
    begun = replace(
        SNAPSHOT,
        evaluated=0,
        complete=0,
        failed=0,
        duplicate=0,
        infeasible=0,
        running=(),
        best=(),
        seconds=0.5,
        seconds_left=None,
    )
    assert status_line(begun) == "0/18 trials; 0 running; 500ms"
