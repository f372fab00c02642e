"""What trials ask of a real Ray: processors, GPUs and shares of them, device models; refusals."""

from collections import Counter
from pathlib import Path
from typing import IO

import pytest
from service_cases import Watcher, held, run, stored
from stub_trials import changed, pretend_cap, stub_study

from archsearch.cluster import Cluster, process
from archsearch.errors import ServiceError
from archsearch.records import TrialState
from archsearch.snapshot import Snapshot
from archsearch.store import Store

pytestmark = pytest.mark.usefixtures("ray_here")


class Releasing(Watcher):
    """Lets go of a lock, without which none can end, once so many trials run at once."""

    def __init__(self, lock: IO[str], wanted: int) -> None:
        super().__init__()
        self._lock = lock
        self._wanted = wanted

    def on_event(self, snapshot: Snapshot) -> None:
        super().on_event(snapshot)
        if sum(bool(trial.worker) for trial in snapshot.running) == self._wanted:
            self._lock.close()


def test_a_trial_on_a_gpu_has_a_process_of_its_own(tmp_path: Path) -> None:
    """So that the device's memory is really given back; and so that it is measured alone."""
    spec = changed(stub_study(tmp_path), "resources", gpus=1.0, parallel=1)
    run(spec, trials=2)
    trials = [trial for trial in stored(spec) if trial.state is TrialState.COMPLETE]
    assert len({trial.attempts[0].pid for trial in trials}) == 2
    assert all(trial.profile is not None and trial.profile.exclusive for trial in trials)


def test_more_at_once_than_fit_is_said(tmp_path: Path) -> None:
    watcher = Watcher()
    run(changed(stub_study(tmp_path), "resources", parallel=64), trials=1, watcher=watcher)
    assert any("64 trials at once do not fit here" in one.note for one in watcher.snapshots)


@pytest.mark.parametrize("timed", [False, True])
def test_latencies_of_another_device_model_are_not_mixed_in(tmp_path: Path, timed: bool) -> None:
    """They are not where they count; a study of recall and state alone may use any device."""
    spec, watcher = stub_study(tmp_path, orders={"timed": 1} if timed else {}), Watcher()
    run(spec, trials=1, watcher=watcher)
    said = [one.note for one in watcher.snapshots]
    assert ("this study's latencies are those of pretended device" in said) is timed
    with Store(spec.tracking.storage) as store, store.database.writing() as connection:
        connection.exec_driver_sql("UPDATE archsearch_studies SET device_model = 'older device'")
    if timed:
        with pytest.raises(ServiceError, match=r"\(pretended device\) than the latencies of this"):
            run(spec, trials=2)
        assert [trial.profile is None for trial in stored(spec)] == [False, True]
    else:
        run(spec, trials=2, watcher=watcher)
        assert any("than this study (older" in one.note for one in watcher.snapshots)


def test_latencies_of_processors_are_measured_alone_on_the_node(tmp_path: Path) -> None:
    timed, watcher = stub_study(tmp_path, "timed", {"timed": 1, "jitter_s": 0.1}), Watcher()
    run(changed(timed, "resources", parallel=None), watcher=watcher)
    assert max(len(one.running) for one in watcher.snapshots) == 1
    profiles = [trial.profile for trial in stored(timed) if trial.profile is not None]
    assert profiles and all(profile.exclusive for profile in profiles)
    untimed = stub_study(tmp_path, "untimed", {"hold": [0, 1]})
    with held(tmp_path) as lock:
        run(untimed, watcher=Releasing(lock, 2))
    assert not any(trial.profile.exclusive for trial in stored(untimed) if trial.profile)


def test_trials_that_share_gpus_run_at_once_each_with_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pretended GPUs take four halves."""
    monkeypatch.setattr(process, "cap", pretend_cap)
    spec = stub_study(tmp_path, orders={"hold": [0, 1, 2, 3]})
    spec = changed(spec, "resources", gpus=0.5, cpus=0, parallel=None)
    with held(tmp_path) as lock:
        run(spec, trials=4, watcher=Releasing(lock, 4))
    nodes = Counter(trial.attempts[0].node for trial in stored(spec))
    assert nodes == {"GPU 0, share 0.475": 2, "GPU 1, share 0.475": 2}
    assert not any(trial.profile.exclusive for trial in stored(spec) if trial.profile)


def test_a_request_that_never_fits_is_refused_with_the_nearest_fit(tmp_path: Path) -> None:
    spec = changed(stub_study(tmp_path), "resources", cpus=4096)
    with pytest.raises(ServiceError, match="asks for 4096 CPUs, and no machine here"):
        run(spec)
    spec = changed(spec, "resources", cpus=1, gpus=2.0, device="H200")
    with pytest.raises(ServiceError, match="1 CPUs and 2 GPUs of type H200"):
        run(spec)
    with Store(spec.tracking.storage) as store:
        assert store.study("stub").coordinator is None, "the study is given back"


@pytest.mark.parametrize("address", ["ray://head:10001", "auto"])
def test_a_cluster_that_cannot_stream_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")  # what `auto` is then
    said = "ray://head:10001 is .* --address auto, or send this command there with `ray job submit`"
    with pytest.raises(ServiceError, match=said):
        Cluster(stub_study(tmp_path).resources, address)
