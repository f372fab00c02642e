"""Imported by the server that coordinators are forked from: runs a study, so that all is loaded."""

import os
import shutil
import tempfile
from pathlib import Path

from fault_driver import TEMPLATES, drive
from stub_trials import changed, stub_study

with tempfile.TemporaryDirectory() as _folder:
    for _name in ("archsearch.db", "mlflow.db"):
        shutil.copy(Path(os.environ[TEMPLATES], _name), _folder)
    _spec = changed(
        stub_study(Path(_folder), "warmup"), "tracking", mlflow=f"sqlite:///{_folder}/mlflow.db"
    )
    drive(changed(_spec, "search", trials=1), None)
