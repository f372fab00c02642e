"""Making a worker's process ready for a trial, before torch is imported.

A task that asked for no GPU sees none, one that shares a GPU keeps to its share of the memory, and
no two processes of a machine share a cache of compiled kernels. Sent to workers by value, as
`greeting` is: it imports the standard library only, because archsearch's own modules import torch.
"""

import fcntl
import importlib
import itertools
import os
import tempfile
import time
from pathlib import Path

_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_OURS_OF_SHARE = 0.95
"""What torch may allocate of a share of a GPU's memory. It does not count CUDA's context, some
0.5 GB a process, which has to fit into the rest."""

_END_S = 30.0
"""After which it ends by itself, because nobody listens."""


def prepare(gpus: float) -> None:
    """Make this process ready for a trial that asked for so many GPUs."""
    if gpus == 0:
        # Ray leaves a machine's GPUs visible to tasks that asked for none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if missing := _CACHES.keys() - os.environ.keys():
        folder = _own_folder()
        os.environ.update({variable: str(folder / _CACHES[variable]) for variable in missing})
    if 0 < gpus < 1:
        cap(gpus * _OURS_OF_SHARE)


def cap(share: float) -> None:
    """Let this process allocate no more than a share of its GPU's memory."""
    torch = importlib.import_module("torch")
    torch.cuda.set_per_process_memory_fraction(share)


def await_end(gpus: float) -> None:
    """Wait until the coordinator, which has heard the last event, kills a process that has a GPU.

    One that ends by itself takes seconds to unload torch, and Ray gives its GPU to nobody before.
    """
    if gpus > 0:
        time.sleep(_END_S)


def _own_folder() -> Path:
    """A folder on this machine that is this process's alone as long as it lives.

    The first free one of a row, so that what earlier processes compiled is found again.
    """
    home = _home()
    for slot in itertools.count():
        folder = home / f"slot-{slot}"
        folder.mkdir(mode=0o700, exist_ok=True)
        # Stays open until the process ends.
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder
        except BlockingIOError:
            os.close(lock)
    raise AssertionError("a row without an end")


def _home() -> Path:
    """Not below the user's home, which machines of a cluster may share over a network."""
    home = Path(tempfile.gettempdir()) / f"archsearch-kernels-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    is_ours = home.is_dir() and not home.is_symlink() and found.st_uid == os.getuid()
    return home if is_ours else Path(tempfile.mkdtemp(prefix="archsearch-kernels-"))
