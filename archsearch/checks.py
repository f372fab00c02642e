"""Is this installation sound? Versions, devices, mixers, kernels, database, MLflow, disk.

Every check runs, whatever the others find. Nothing is written anywhere.
"""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from archsearch.errors import ArchsearchError
from archsearch.kernel_check import check_kernels
from archsearch.registry import load_mixer, mixer_fields, mixer_names
from archsearch.store import Store
from archsearch.tracking import check_mlflow
from archsearch.units import format_bytes

LIBRARIES = ("archsearch", "torch", "ray", "optuna", "mlflow", "sqlalchemy", "pydantic", "typer")
LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


def run_checks(storage: str, mlflow: str | None) -> Iterator[Check]:
    """Yield checks as they are done; the kernels take some seconds."""
    yield Check("python", True, f"{platform.python_version()} on {platform.platform()}")
    yield from map(_library, LIBRARIES)
    yield from _devices()
    for name in mixer_names():
        yield _attempt(f"mixer {name}", partial(_mixer, name))
    for device in _device_names():
        yield from _kernels(device)
    yield _attempt("database", partial(_database, storage))
    if mlflow is not None:
        yield _attempt("tracking", partial(check_mlflow, mlflow))
    yield _disk()


def checks_values(checks: list[Check]) -> list[dict[str, Any]]:
    return [asdict(check) for check in checks]


def check_line(check: Check) -> str:
    """One check in one line."""
    return f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<28} {check.detail}"


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except ArchsearchError as error:
        return Check(name, False, str(error))


def _library(name: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, "not installed")


def _device_names() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _devices() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    yield Check("device cpu", True, f"{cores} cores, {torch.get_num_threads()} threads in torch")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        detail = f"{found.name}, {format_bytes(found.total_memory)}, CUDA {torch.version.cuda}"
        yield Check(f"device cuda:{index}", True, detail)


def _mixer(name: str) -> str:
    load_mixer(name)
    return f"{len(mixer_fields(name))} fields"


def _kernels(device: str) -> Iterator[Check]:
    for verdict in check_kernels(device):
        yield Check(
            f"kernel {verdict.family}.{verdict.backend}",
            verdict.ok,
            f"on {verdict.device}, {verdict.dtype}: error {verdict.forward_error:.1e} forward, "
            f"{verdict.gradient_error:.1e} gradients; allowed {verdict.tolerance:.1e} "
            f"({verdict.worst})",
        )


def _database(storage: str) -> str:
    file = storage.removeprefix("sqlite:///")
    if file != storage and not Path(file).exists():
        return f"{storage} does not exist yet; the first run makes it"
    with Store(storage) as store:
        return f"{storage} answers; it holds {len(store.studies())} studies"


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    return Check("disk", free >= LEAST_FREE_BYTES, f"{format_bytes(free)} free in {Path.cwd()}")
