"""MLflow's SQLite file: made whole or not at all, wherever it is; what is none is said at once."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from archsearch.errors import ServiceError
from archsearch.tracking import check_mlflow
from archsearch.tracking.view import _folder_beside, connect

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


def test_a_kill_while_the_database_is_made_leaves_none_that_is_half_made(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    code = f"from archsearch.tracking.view import connect; connect({uri!r}).search_experiments()"
    with subprocess.Popen([sys.executable, "-c", code]) as maker:
        # A whole one has about a megabyte.
        while not any(path.stat().st_size > 2e5 for path in tmp_path.rglob("mlflow.db")):
            assert maker.poll() is None
        maker.kill()
    assert [one.name for one in connect(uri).search_experiments()] == ["Default"]
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_what_another_process_is_making_is_left_alone(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    connect(uri)
    with _folder_beside(tmp_path / "mlflow.db") as folder:
        connect(uri)
        assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_folder_of_any_name_holds_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's 50%41 ü"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert connect("sqlite:///mlflow.db").search_experiments()
    assert [path.name for path in folder.iterdir()] == ["mlflow.db"]


def test_what_is_no_database_is_said_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ServiceError, match="unable to open database file"):
        check_mlflow(f"sqlite:///{tmp_path}")
    assert time.monotonic() - began < 30
