"""The file in which a long trial keeps its progress, so that a lost one goes on from a rung.

It lies in a folder beside the trained weights and is named by what decides its content: the
architecture and the recipe. A worker that does not see the folder keeps nothing. Whatever is wrong
with a file or a disk costs time, never a result: such a trial starts anew. Safetensors, so nothing
that is read is ever run. Knows nothing of studies.
"""

import contextlib
import os
import time
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from archsearch.messages import Rung
from archsearch.population import Population, Progress

EVERY_S = 60.0
"""A rung that comes sooner after the last one kept, or the start, is not worth a file."""

_RUNGS = "rungs"
_rungs: TypeAdapter[tuple[Rung, ...]] = TypeAdapter(tuple[Rung, ...])


class Checkpoint:
    """The progress of one trial on disk.

    Args:
        folder: where checkpoints lie. If it is None, or not there on this machine, nothing is kept.
        name: of the file, without its suffix.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        seen = folder is not None and folder.is_dir()
        self._path = folder / f"{name}.safetensors" if folder is not None and seen else None
        self._kept = time.monotonic()

    def load(self) -> Progress | None:
        """The progress of an attempt before this one; None if there is none that can be read."""
        if self._path is None or not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                rungs = _rungs.validate_json(file.metadata()[_RUNGS])
                names = file.keys()
                return Progress(rungs, {name: file.get_tensor(name) for name in names})
        except (OSError, SafetensorError, TypeError, KeyError, ValidationError):
            return None

    def keep(self, population: Population) -> None:
        """Write the progress of a population between two rungs, if the last is long ago."""
        if self._path is None or time.monotonic() - self._kept < EVERY_S:
            return
        progress = population.progress
        unfinished = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            rungs = _rungs.dump_json(progress.rungs).decode()
            save_file(progress.tensors, unfinished, {_RUNGS: rungs})
            unfinished.replace(self._path)
        except (OSError, SafetensorError):
            _remove(unfinished)
        self._kept = time.monotonic()

    def remove(self) -> None:
        """Forget the progress, which has become a result or never will."""
        if self._path is not None:
            _remove(self._path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
