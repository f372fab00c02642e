"""The store: what goes in comes out, who may write, and what is said when it cannot be opened."""

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from samples import add, begin, sample_study, sample_trials

from archsearch.errors import FailureClass, ServiceError, StudyRefusedError, UsageError
from archsearch.messages import PluginFile, Rung, Started
from archsearch.records import AttemptState, StudyRecord, TrialState
from archsearch.spec import Limit
from archsearch.store import Store
from archsearch.store.claim import claim
from archsearch.store.database import VERSION_TABLE
from archsearch.store.holder import Holder
from archsearch.store.ledger import Ledger, NewTrial, Verdict
from archsearch.store.results import find_evaluation, find_profile, plain, put_evaluation
from archsearch.store.tables import metadata, rungs, studies

STUDY = sample_study()
TRIALS = sample_trials(STUDY, 24)
DEAD = Holder(Holder.this_process().host, 2**22 + 1, "1", Holder.this_process().machine)
ELSEWHERE = Holder("other-host", 17, "1", "another boot")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/archsearch.db", create=True) as opened:
        yield opened


def pending(ledger: Ledger, number: int = 0) -> NewTrial:
    new = NewTrial(number, TRIALS[number].arch, {}, {}, {})
    ledger.add_trial(new)
    return new


def set_holder(store: Store, holder: Holder, seconds_left: float) -> None:
    """Make a study look held by somebody else."""
    until = datetime.now(UTC) + timedelta(seconds=seconds_left)
    with store.database.writing() as connection:
        connection.execute(
            sa.update(studies).values(
                lease_token="theirs", lease_holder=holder.plain(), lease_until=until
            )
        )


def test_trials_come_out_as_they_went_in(store: Store) -> None:
    add(store, begin(store, STUDY), TRIALS)
    kept = ("number", "state", "params", "metrics", "duplicate_of", "failure", "message")
    found = store.trials(STUDY.name)
    for before, after in zip(TRIALS, found, strict=True):
        assert {k: getattr(before, k) for k in kept} == {k: getattr(after, k) for k in kept}
        assert after.arch.canonical_json == before.arch.canonical_json
        assert after.arch.arch_hash == before.arch.arch_hash
        assert after.profile == before.profile
        assert after.proposed_at.tzinfo is not None
    assert [trial.number for trial in found if trial.feasible]
    assert store.trial(STUDY.name, 3) == found[3]


def test_study_comes_out_as_it_went_in(store: Store) -> None:
    plugin = PluginFile(name="mine", source="x = 1")
    ledger = claim(store, STUDY.spec, (plugin,), {"name": "tpe"})
    ledger.set_reference({"recall": 0.0})
    ledger.set_device_model("some device")
    found = store.study(STUDY.name)
    assert found.spec == STUDY.spec
    assert found.plugins == (plugin,)
    assert (found.reference, found.device_model) == ({"recall": 0.0}, "some device")
    assert found.coordinator == f"{os.uname().nodename} pid {os.getpid()}"
    ledger.release("trials", 12.5)
    left = store.study(STUDY.name)
    assert (left.coordinator, left.stop_reason, left.seconds_run) == (None, "trials", 12.5)


def test_what_does_not_exist_is_a_users_error(store: Store) -> None:
    with pytest.raises(UsageError, match="it holds no study yet"):
        store.study("sample")
    ledger = begin(store, STUDY)
    with pytest.raises(UsageError, match="no trial 0; it has no trial yet"):
        store.trial("sample", 0)
    pending(ledger)
    with pytest.raises(UsageError, match="no trial 9; it has numbers 0 to 0"):
        store.trial("sample", 9)
    with pytest.raises(UsageError, match="did you mean 'sample'"):
        store.trials("sampel")
    assert store.studies() == ["sample"]


def test_attempts_and_rungs_are_kept(store: Store) -> None:
    ledger = begin(store, STUDY)
    pending(ledger)
    ledger.start_attempt(0, "first")
    ledger.note_started("first", Started(node="n1", pid=5, device_model="d"))
    ledger.add_rung("first", rung(0))
    ledger.fail_attempt("first", FailureClass.LOST, "gone")
    ledger.start_attempt(0, "second")
    ledger.add_rung("second", rung(0))
    ledger.add_rung("second", rung(1))
    found = store.trial(STUDY.name, 0)
    first, second = found.attempts
    assert (first.attempt, first.state, first.node, first.pid) == (1, AttemptState.FAILED, "n1", 5)
    assert (first.failure, first.message) == (FailureClass.LOST, "gone")
    assert (second.attempt, second.state) == (2, AttemptState.RUNNING)
    assert [one.rung for one in found.rungs] == [0, 1]


def rung(number: int) -> Rung:
    return Rung(
        rung=number, step=1, epoch=1.0, seconds=1.0, train_loss=(None,), selection_recall=(0.5,)
    )


def test_a_late_answer_changes_nothing_and_is_kept(store: Store) -> None:
    ledger = begin(store, STUDY)
    pending(ledger)
    ledger.start_attempt(0, "old")
    ledger.fail_attempt("old", FailureClass.LOST, "no sign of life")
    ledger.start_attempt(0, "new")
    late = Verdict(TrialState.COMPLETE, metrics={"recall": 0.1})
    assert not ledger.finish(0, late, "old")
    ledger.note_late_answer("old", {"kind": "profiled"})
    assert store.trial(STUDY.name, 0).state is TrialState.PENDING
    assert ledger.finish(0, Verdict(TrialState.COMPLETE, metrics={"recall": 0.9}), "new")
    assert not ledger.finish(0, late, "new"), "a final trial does not change"
    found = store.trial(STUDY.name, 0)
    assert found.metrics["recall"] == 0.9
    assert [one.state for one in found.attempts] == [AttemptState.FAILED, AttemptState.DONE]


def test_results_are_shared_and_the_first_one_stays(store: Store) -> None:
    begin(store, STUDY)
    trial = next(trial for trial in TRIALS if trial.feasible)
    assert trial.evaluation is not None and trial.profile is not None
    other = trial.evaluation.model_copy(update={"recall": 0.123})
    with store.database.writing() as connection:
        first = put_evaluation(connection, trial.evaluation, "path", "digest")
        assert put_evaluation(connection, other, "path2", "digest2") == first
    found = find_evaluation(store.database, trial.arch.arch_hash, "sample")
    assert found is not None and found.evaluation == trial.evaluation
    assert find_evaluation(store.database, trial.arch.arch_hash, "other recipe") is None
    assert find_profile(store.database, trial.arch.arch_hash, "sample device", "key") is None


def test_numbers_that_json_cannot_hold_become_null() -> None:
    report = rung(0).model_copy(update={"train_loss": (float("nan"), float("inf"), 0.25)})
    assert plain(report)["train_loss"] == [None, None, 0.25]


def test_outbox_holds_final_trials_until_they_are_published(store: Store) -> None:
    add(store, begin(store, STUDY), TRIALS[:5])
    pending(claim_again(store, STUDY), 5)
    assert [trial.number for trial in store.unpublished("sample")] == [0, 1, 2, 3, 4]
    store.mark_published("sample", [0, 2, 3])
    store.mark_published("sample", [0])
    assert [trial.number for trial in store.unpublished("sample")] == [1, 4]


def claim_again(store: Store, study: StudyRecord) -> Ledger:
    with store.database.writing() as connection:
        connection.execute(sa.update(studies).values(lease_token=None, lease_holder=None))
    return claim(store, study.spec, (), {})


def test_a_study_is_held_by_one_coordinator(store: Store) -> None:
    begin(store, STUDY)
    with pytest.raises(StudyRefusedError, match=f"pid {os.getpid()}"):
        begin(store, STUDY)
    assert begin(store, sample_study("another")).taken_from is None


def test_the_hold_of_a_dead_process_is_taken_over_at_once(store: Store) -> None:
    begin(store, STUDY)
    set_holder(store, DEAD, seconds_left=50)
    assert begin(store, STUDY).taken_from == DEAD


def test_a_process_number_used_again_is_another_process(store: Store) -> None:
    begin(store, STUDY)
    set_holder(store, replace(Holder.this_process(), started="1"), seconds_left=50)
    assert begin(store, STUDY).taken_from is not None


def test_a_hold_on_another_machine_must_run_out(store: Store) -> None:
    begin(store, STUDY)
    set_holder(store, ELSEWHERE, seconds_left=50)
    with pytest.raises(StudyRefusedError, match="other-host pid 17"):
        begin(store, STUDY)
    set_holder(store, ELSEWHERE, seconds_left=-1)
    assert begin(store, STUDY).taken_from == ELSEWHERE


def test_who_lost_the_hold_writes_nothing_more(store: Store) -> None:
    ledger = begin(store, STUDY)
    pending(ledger)
    set_holder(store, ELSEWHERE, seconds_left=50)
    writes: list[Any] = [
        lambda: pending(ledger, 1),
        lambda: ledger.renew(1.0),
        lambda: ledger.start_attempt(0, "token"),
        lambda: ledger.finish(0, Verdict(TrialState.COMPLETE)),
        lambda: ledger.set_reference({}),
        lambda: ledger.release("trials", 1.0),
        ledger.check,
    ]
    for write in writes:
        with pytest.raises(StudyRefusedError, match="other-host pid 17 holds it now"):
            write()
    assert [trial.state for trial in store.trials("sample")] == [TrialState.PENDING]
    assert store.study("sample").coordinator == "other-host pid 17"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("seed", 99),
        ("limits", (Limit(metric="state_bytes", maximum=5),)),
        ("task", STUDY.spec.task.model_copy(update={"seed": 9})),
        ("train", STUDY.spec.train.model_copy(update={"epochs": 9})),
        ("model", STUDY.spec.model.model_copy(update={"width": (64,)})),
        ("objectives", STUDY.spec.objectives[:2]),
    ],
)
def test_another_study_of_the_same_name_is_refused(store: Store, part: str, value: Any) -> None:
    begin(store, STUDY).release("trials", 1.0)
    other = STUDY.spec.model_copy(update={part: value})
    with pytest.raises(StudyRefusedError, match=f"these parts differ: {part}\\. "):
        claim(store, other, (), {})


def test_an_edited_plugin_is_another_study(store: Store) -> None:
    claim(store, STUDY.spec, (PluginFile(name="mine", source="1"),), {}).release("trials", 1.0)
    with pytest.raises(StudyRefusedError, match="differ: plugins"):
        claim(store, STUDY.spec, (PluginFile(name="mine", source="2"),), {})


def test_budgets_and_places_may_change(store: Store) -> None:
    begin(store, STUDY).release("trials", 1.0)
    search = STUDY.spec.search.model_copy(update={"trials": 99})
    resources = STUDY.spec.resources.model_copy(update={"cpus": 2})
    spec = STUDY.spec.model_copy(update={"search": search, "resources": resources})
    claim(store, spec, (), {"name": "another"})
    found = store.study("sample")
    assert found.spec == spec
    assert found.sampler == {}, "what the sampler was resolved to stays"


def test_migrations_make_the_tables_that_the_code_uses(store: Store) -> None:
    with store.database.reading() as connection:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []


def test_opening_again_changes_nothing(store: Store) -> None:
    begin(store, STUDY)
    with Store(str(store.database.url)) as again:
        assert again.studies() == ["sample"]


def test_first_starts_at_once_all_succeed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/archsearch.db"
    barrier, errors = threading.Barrier(4), list[Exception]()

    def open_it() -> None:
        barrier.wait()
        try:
            Store(url, create=True).close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_first_start_waits_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself does not wait while the file's journal mode changes."""
    path = tmp_path / "archsearch.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE theirs (x)")
    other.execute("BEGIN IMMEDIATE")
    pauses: list[float] = []

    def other_goes_on(seconds: float) -> None:
        pauses.append(seconds)
        other.execute("COMMIT")
        other.close()

    monkeypatch.setattr("archsearch.store.database.time.sleep", other_goes_on)
    Store(f"sqlite:///{path}", create=True).close()
    assert len(pauses) == 1


def test_two_threads_and_a_process_write_at_once(store: Store) -> None:
    """Nobody meets a locked database: writers wait for each other, readers for nobody."""
    ledger = begin(store, STUDY)
    program = (
        "import sys\nfrom samples import *\n"
        "with Store(sys.argv[1]) as store:\n"
        "    ledger = begin(store, sample_study('other'))\n"
        "    [ledger.renew(float(i)) for i in range(200)]\n"
    )
    url = str(store.database.url)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", program, url], env=env)
    pending(ledger)

    def publish() -> None:
        for _ in range(100):
            store.trials("sample")
            store.mark_published("sample", [0])

    thread = threading.Thread(target=publish)
    thread.start()
    for index in range(200):
        ledger.renew(float(index))
    thread.join()
    assert process.wait(60) == 0
    assert store.study("other").seconds_run == 199.0


def test_foreign_keys_are_enforced(store: Store) -> None:
    def add_rung_of_no_attempt() -> None:
        with store.database.writing() as connection:
            connection.execute(sa.insert(rungs).values(attempt_id=12345, rung=0, report={}))

    with pytest.raises(sa.exc.IntegrityError):
        add_rung_of_no_attempt()


def test_a_missing_database_is_not_made_by_looking(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="there is no database"):
        Store(f"sqlite:///{tmp_path}/archsearch.db")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "archsearch.db"
    path.write_text("a letter to my grandmother, quite long enough to be no database" * 20)
    with pytest.raises(ServiceError, match="file is not a database"):
        Store(f"sqlite:///{path}", create=True)


def test_a_database_of_a_newer_archsearch_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "archsearch.db"
    Store(f"sqlite:///{path}", create=True).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    with pytest.raises(ServiceError, match="schema 9999, written by a newer archsearch"):
        Store(f"sqlite:///{path}", create=True)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:////no/such/folder/archsearch.db", "no folder /no/such/folder"),
        ("sqlite:////proc/archsearch.db", "write in its folder, even to read"),
        ("sqlite:////proc/archsearch.db", "unable to open database file"),
        ("sqlite://", "in memory only"),
        ("sqlite:///:memory:", "in memory only"),
        ("mysql://host/name", "'mysql' is not supported; accepted: sqlite, postgresql"),
        ("archsearch.db", "is not a database URL; accepted: sqlite:///FILE"),
        ("postgresql+psycopg://me:secret@127.0.0.1:1/x", "cannot be opened|cannot be read"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_sentence(url: str, said: str) -> None:
    with pytest.raises(ServiceError, match=said) as caught:
        Store(url, create=True)
    assert "secret" not in str(caught.value)
