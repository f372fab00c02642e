"""How many members of a trial fit a device together: counted before training, not found by failing.

A training step of the largest batch is run on tensors without values (torch's meta device), forward
and backward, and the bytes alive are counted, operation by operation. To their peak come parameters
with gradient and optimiser, and the resident examples. Attention has no fused kernel on the meta
device; where the count says no, fake tensors that stand for a CPU's are counted, more slowly, which
have one. A compiled step needs less than counted here.

Knows nothing of studies. One member is trained even where it does not fit by this count.

Shape suffixes: M members, N labelled rows.
"""

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from archsearch_kernels import REFERENCE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from archsearch.arch import ArchSpec
from archsearch.cost import compute_dtype
from archsearch.group import Layout
from archsearch.grouped import GroupedModel
from archsearch.model import HEAD, LanguageModel
from archsearch.spec import MqarSpec, Segment, TrainSpec, model_vocab_size

_SHARES = {"cuda": 0.9, "cpu": 0.5}
"""Of the memory that is free, what a population may take: on a GPU what fragments is left over, on
a CPU there are other trials beside this one."""

_KEPT_COPIES = 4
"""Buffers of the size of the masters that every member keeps, also while its group waits:
parameters, gradient, two moments."""

_UPDATE_COPIES = 2
"""Such buffers that an update of a group needs meanwhile."""

_CAPTURE_COPIES = 3
"""And those that a capture needs, to undo its warm-up: parameters and moments."""

_CAPTURED_PEAKS = 2
"""A captured step's memory stays with the graphs while the next shape warms up in its own."""

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USED = Path("/sys/fs/cgroup/memory.current")


def members_together(
    arch: ArchSpec,
    task: MqarSpec,
    train: TrainSpec,
    device: torch.device | str,
    backends: Mapping[str, str],
    available: int | None = None,
) -> int:
    """How many of a trial's members fit the device together, at least 1.

    Args:
        available: bytes that may be used; None: a share of what is free now.

    Raises:
        PluginError, InfeasibleError: from the mixers of the architecture.
    """
    device = torch.device(device)
    room = available_bytes(device) if available is None else available
    for exact in (False, True):
        members = train.population
        while members > 1:
            needed = population_bytes(arch, task, train, device, backends, members, exact)
            if needed <= room:
                return members
            members = min(members - 1, max(1, members * room // needed))
    return 1


def available_bytes(device: torch.device) -> int:
    """Bytes that one population may use on a device."""
    return int(_SHARES[device.type] * _free_bytes(device))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free, whole = torch.cuda.mem_get_info(device)
        # A process that shares its GPU may have less than is free: others are about to take theirs.
        # Its fraction is asked for by index, where "cuda" alone, the current one, has none.
        share = int(torch.cuda.get_per_process_memory_fraction(device.index) * whole)
        return min(free + torch.cuda.memory_reserved(device) - used, share - used)
    if not _MEMINFO.exists():
        return 2**63 - 1  # a system that does not say; nothing is split there
    lines = _MEMINFO.read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if _GROUP_LIMIT.exists() and (limit := _GROUP_LIMIT.read_text().strip()) != "max":
        free = min(free, max(0, int(limit) - int(_GROUP_USED.read_text())))
    return free


def population_bytes(
    arch: ArchSpec,
    task: MqarSpec,
    train: TrainSpec,
    device: torch.device,
    backends: Mapping[str, str],
    members: int,
    exact: bool,
) -> int:
    """Bytes of a population while so many of its members are trained together.

    Args:
        exact: count on fake tensors.
    """
    with torch.device("meta"):
        model = LanguageModel(arch, model_vocab_size(task, train), train.embed_dropout)
    model.use_backends(backends)
    working = compute_dtype(train.precision)
    steps = [
        _peak_bytes(model, train, members, backends, exact, rows, segment, task, gradients)
        for gradients, segments, rows in (
            (True, task.train, train.batch_size),
            (False, task.test, train.test_batch_size),
        )
        for segment in _largest(task, segments)
    ]
    row, captures = Layout.of(model).total, device.type == "cuda"
    kept = 4 * _KEPT_COPIES + (working.itemsize if working is not torch.float32 else 0)
    meanwhile = 4 * (_UPDATE_COPIES + (_CAPTURE_COPIES if captures else 0))
    masters = row * (train.population * kept + members * meanwhile)
    return (_CAPTURED_PEAKS if captures else 1) * max(steps) + masters + _resident_bytes(task)


def _largest(task: MqarSpec, segments: tuple[Segment, ...]) -> list[Segment]:
    """Segments that have no other with as many tokens and as many pairs or more."""
    sizes = {(task.length_of(one), one.pairs): one for one in segments}
    return [
        one
        for (length, pairs), one in sizes.items()
        if not any(
            other != (length, pairs) and other[0] >= length and other[1] >= pairs for other in sizes
        )
    ]


def _resident_bytes(task: MqarSpec) -> int:
    """Of the examples on the device: int32 tokens, positions and labels of all three splits."""
    return 4 * sum(
        one.examples * (task.length_of(one) + 2 * one.pairs)
        for one in (*task.train, *task.test, *task.test)
    )


def _peak_bytes(
    model: LanguageModel,
    train: TrainSpec,
    members: int,
    backends: Mapping[str, str],
    exact: bool,
    rows: int,
    segment: Segment,
    task: MqarSpec,
    gradients: bool,
) -> int:
    """Peak of the bytes that one batch takes: a training step's, or an evaluation's."""
    working = compute_dtype(train.precision)
    device = "cpu" if exact else "meta"
    count = min(rows, segment.examples)
    length, pairs = task.length_of(segment), segment.pairs
    if gradients and train.objective is not None:
        pairs = length  # a masked token may be anywhere
    with FakeTensorMode(allow_non_fake_inputs=True) if exact else nullcontext():

        def stacked(tensor: Tensor) -> Tensor:
            dtype = working if tensor.is_floating_point() else tensor.dtype
            return torch.empty(members, *tensor.shape, dtype=dtype, device=device)

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        parameters = {name: stacked(each) for name, each in model.named_parameters()}
        buffers = {name: stacked(each) for name, each in model.named_buffers()}
        grouped = GroupedModel(model, dict.fromkeys(buffers, 0), backends.get(HEAD, REFERENCE))
        batch = (numbers(count, length), numbers(count, pairs), numbers(count * pairs))
        with _Alive() as alive:
            if gradients:
                grouped.gradients(parameters, buffers, *batch, None, numbers(members))
            else:
                grouped.hits(parameters, buffers, *batch)
    peak: int = alive.peak
    return peak


class _Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._bytes:
                    self._bytes[storage._cdata] = storage.nbytes()
                    self._now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        self.peak = max(self.peak, self._now)
        return made

    def _freed(self, key: int) -> None:
        self._now -= self._bytes.pop(key)
