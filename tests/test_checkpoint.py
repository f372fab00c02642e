"""A lost trial goes on from its last rung, and a bad file costs time and nothing else."""

from itertools import takewhile
from pathlib import Path

import pytest

from archsearch import checkpoint
from archsearch.arch import ArchSpec, LayerSpec
from archsearch.feed import Feed
from archsearch.group import Group
from archsearch.messages import Evaluated, Event, Failed, ProfileSpec, Rung, TrialRequest
from archsearch.spec import MqarSpec, Segment, TrainSpec
from archsearch.trial import run_trial

TASK = MqarSpec(
    recipe="custom",
    vocab_size=24,
    train=(Segment(length=12, pairs=2, examples=64),),
    test=(Segment(length=12, pairs=2, examples=40),),
)
TRAIN = TrainSpec(
    learning_rates=(1e-2, 1e-3), seeds=2, epochs=3, batch_size=16, test_batch_size=16, rungs=3
)


@pytest.fixture(autouse=True)
def every_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "EVERY_S", 0.0)


def request(folder: Path | None, train: TrainSpec = TRAIN) -> TrialRequest:
    layers = tuple(LayerSpec(mixer=mixer, fields={}) for mixer in ("base_conv", "attention"))
    return TrialRequest(
        study="s",
        number=0,
        token="t",
        arch=ArchSpec(width=16, layers=layers),
        task=TASK,
        train=train,
        profile=ProfileSpec(prefill=((1, 12),), decode=((1, 12),), exclusive=False),
        seed=3,
        device="cpu",
        checkpoints=str(folder) if folder is not None else None,
    )


def lose_after(rung: int, asked: TrialRequest) -> None:
    """Run a trial whose worker is gone after a rung; what it would keep then is kept."""
    running = run_trial(asked)
    list(takewhile(lambda event: not isinstance(event, Rung) or event.rung <= rung, running))
    running.close()


def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    launch = Group._launch_step

    def counted(group: Group, feed: Feed) -> None:
        taken.append(1)
        launch(group, feed)

    monkeypatch.setattr(Group, "_launch_step", counted)
    return taken


def result_of(events: list[Event]) -> tuple[object, bytes]:
    """What a trial found, without how long it took."""
    (found,) = (event for event in events if isinstance(event, Evaluated))
    plain = found.evaluation.model_dump(exclude={"train_seconds", "rungs"})
    rungs = [rung.model_dump(exclude={"seconds"}) for rung in found.evaluation.rungs]
    assert rungs == [one.model_dump(exclude={"seconds"}) for one in events if isinstance(one, Rung)]
    return (plain, rungs), found.weights


def test_a_lost_trial_goes_on_from_its_last_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = result_of(list(run_trial(request(None))))
    lose_after(1, request(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    taken = steps_taken(monkeypatch)
    assert result_of(list(run_trial(request(tmp_path)))) == whole
    assert len(taken) == 4  # one epoch of three
    assert not list(tmp_path.iterdir())


def test_another_recipe_begins_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_after(1, request(tmp_path))
    taken = steps_taken(monkeypatch)
    list(run_trial(request(tmp_path, TRAIN.model_copy(update={"batch_size": 8}))))
    assert len(taken) == 24


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"\x08" + b"\0" * 7 + b"{}" * 4])
def test_a_file_that_cannot_be_read_costs_time_only(tmp_path: Path, content: bytes) -> None:
    whole = result_of(list(run_trial(request(None))))
    lose_after(0, request(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert result_of(list(run_trial(request(tmp_path)))) == whole


def test_a_folder_that_is_not_there_or_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = result_of(list(run_trial(request(None))))
    assert result_of(list(run_trial(request(tmp_path / "elsewhere")))) == whole
    assert not list(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert result_of(list(run_trial(request(tmp_path)))) == whole


def test_a_trial_that_fails_by_itself_leaves_nothing(tmp_path: Path) -> None:
    wild = TRAIN.model_copy(update={"learning_rates": (3e4,), "rungs": 12})
    events = list(run_trial(request(tmp_path, wild)))
    assert any(isinstance(event, Rung) for event in events)
    assert isinstance(events[-1], Failed)
    assert not list(tmp_path.iterdir())


def test_short_trials_write_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "EVERY_S", 60.0)
    lose_after(1, request(tmp_path))
    assert not list(tmp_path.iterdir())
