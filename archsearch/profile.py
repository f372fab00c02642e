"""Measure an architecture on a device: prefill and decode latency, state held, peak memory.

Latencies are those of a warm model, the median over repeats that go round all points in turn, so
that a slow moment of the machine falls on every point. Prefill reads a full context from the empty
state and scores its last position; decode takes the last steps of a full context, one at a time,
and is divided by their number. On CUDA the decode steps are one captured graph, timed by events.

State is not only declared: sequences are run and the tensors kept are counted. Peak memory is the
most bytes of tensors alive at once, weights and state included: what CUDA's allocator reports on
CUDA, and on the CPU the storages seen by torch's dispatcher (workspace inside an operator is left
out there). Weights are random: none of these numbers depends on them.

Shape suffixes: B batch, T tokens.
"""

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from archsearch.arch import ArchSpec
from archsearch.cost import compute_dtype
from archsearch.device import device_model
from archsearch.errors import PluginError
from archsearch.messages import LatencyPoint, Profile, ProfileSpec
from archsearch.mixer import State, state_bytes
from archsearch.model import LanguageModel, ModelState

_DECODE_STEPS = 8
_WARM_RUNS = 2
_MIN_REPEATS, _MAX_REPEATS = 5, 100
_TIME_BUDGET_S = 1.0
"""Rounds of repeats go on until this is spent, within the two bounds above."""
_WEIGHT_SEED = 0


@torch.no_grad()
def profile(
    arch: ArchSpec,
    vocab_size: int,
    spec: ProfileSpec,
    precision: str,
    device: torch.device | str,
    backends: Mapping[str, str] | None = None,
) -> Profile:
    """Measure one architecture at every (batch, context) that `spec` asks for.

    Raises:
        PluginError: a mixer keeps another number of bytes than it declares.
        torch.OutOfMemoryError: a point does not fit the device.
    """
    place, dtype = torch.device(device), compute_dtype(precision)
    model = _model(arch, vocab_size, dtype, place, backends or {})
    held = {
        context: _held_bytes(model, context, dtype, place)
        for context in sorted({context for _, context in spec.decode})
    }
    points: list[_Prefill | _Decode] = [
        *(_Prefill(model, batch, context, dtype, place) for batch, context in spec.prefill),
        *(_Decode(model, batch, context, dtype, place) for batch, context in spec.decode),
    ]
    peak = max((_peak_bytes(point, model, place) for point in points), default=0)
    latencies = _measure(points)
    return Profile(
        arch_hash=arch.arch_hash,
        device_model=device_model(place),
        exclusive=spec.exclusive,
        prefill=latencies[: len(spec.prefill)],
        decode=latencies[len(spec.prefill) :],
        state_bytes=held,
        peak_memory_bytes=peak,
        threads=torch.get_num_threads(),
    )


def _model(
    arch: ArchSpec,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    backends: Mapping[str, str],
) -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_WEIGHT_SEED)
        model = LanguageModel(arch, vocab_size).to(device=device, dtype=dtype)
    model.use_backends(backends)
    return model


def _tokens(model: LanguageModel, batch: int, count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_WEIGHT_SEED)
    return torch.randint(0, model.vocab_size, (batch, count), generator=generator).to(device)


def _held_bytes(
    model: LanguageModel, context: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Read `context` tokens, the last ones by `step`; count what one sequence keeps on the way."""
    tokens_BT = _tokens(model, 1, context, device)
    steps = min(_DECODE_STEPS, context)
    state = model.init_state(1, context, dtype, device)
    if context > steps:
        _, state = model.mix(tokens_BT[:, :-steps], state)
        _kept_bytes(model, state, context, dtype)
    for token_B in tokens_BT[:, -steps:].unbind(1):
        _, state = model.step(token_B, state)
    return _kept_bytes(model, state, context, dtype)


def _kept_bytes(model: LanguageModel, state: ModelState, context: int, dtype: torch.dtype) -> int:
    """Bytes of a state, which must be those declared, layer by layer.

    Counted by storage: a small view of a large tensor keeps all of it.
    """
    total = 0
    for layer, block, part in zip(model.arch.layers, model.layers, state, strict=True):
        storages = {s._cdata: s.nbytes() for s in map(Tensor.untyped_storage, part.values())}
        kept = sum(storages.values())
        declared = state_bytes(block.mixer.config, context, dtype)
        if kept != declared:
            raise PluginError(
                f"mixer '{layer.mixer}' declares a state of {declared:,} bytes at context "
                f"{context} and keeps {kept:,}; its state_spec must list every tensor it keeps"
            )
        total += kept
    return total


@dataclass(frozen=True)
class _Prefill:
    """Reads a full context from the empty state."""

    model: LanguageModel
    batch: int
    context: int
    dtype: torch.dtype
    device: torch.device

    def prepare(self) -> Callable[[], float]:
        """Return a function that runs once and gives milliseconds."""
        model = self.model
        tokens_BT = _tokens(model, self.batch, self.context, self.device)
        empty = model.init_state(self.batch, self.context, self.dtype, self.device)

        def run() -> None:
            hidden_BTD, _ = model.mix(tokens_BT, empty)
            model.logits(hidden_BTD[:, -1])

        return lambda: _time_ms(run, self.device)


@dataclass(frozen=True)
class _Decode:
    """Takes the last steps of a full context."""

    model: LanguageModel
    batch: int
    context: int
    dtype: torch.dtype
    device: torch.device

    def prepare(self) -> Callable[[], float]:
        """Return a function that runs once and gives milliseconds a step."""
        model, steps = self.model, min(_DECODE_STEPS, self.context)
        tokens_BT = _tokens(model, self.batch, self.context, self.device)
        before = model.init_state(self.batch, self.context, self.dtype, self.device)
        if self.context > steps:
            _, before = model.mix(tokens_BT[:, :-steps], before)
        state = _copied(before)

        def run() -> None:
            now = _copied_names(state)
            for token_B in tokens_BT[:, -steps:].unbind(1):
                _, now = model.step(token_B, now)

        if self.device.type == "cuda":
            run = _captured(run)

        def timed() -> float:
            _restore(state, before)
            return _time_ms(run, self.device) / steps

        return timed


def _copied(state: ModelState) -> ModelState:
    return tuple({name: tensor.clone() for name, tensor in part.items()} for part in state)


def _copied_names(state: ModelState) -> ModelState:
    """New dictionaries of the same tensors: a step may put other tensors into the ones it gets."""
    return tuple(State(part) for part in state)


def _restore(state: ModelState, values: ModelState) -> None:
    for part, source in zip(state, values, strict=True):
        for name, tensor in part.items():
            tensor.copy_(source[name])


@dataclass(frozen=True)
class _Captured:
    """A CUDA graph of a function. It reads that function's tensors, so it keeps them alive."""

    graph: torch.cuda.CUDAGraph
    source: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def _captured(run: Callable[[], None]) -> _Captured:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _Captured(graph, run)


def _time_ms(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _measure(points: list[_Prefill | _Decode]) -> tuple[LatencyPoint, ...]:
    """Time all points in turn until the budget is spent."""
    timers = [point.prepare() for point in points]
    for timer in timers:
        for _ in range(_WARM_RUNS):
            timer()
    times: list[list[float]] = [[] for _ in timers]
    begun, rounds = time.perf_counter(), 0
    while rounds < _MIN_REPEATS or (
        rounds < _MAX_REPEATS and time.perf_counter() - begun < _TIME_BUDGET_S
    ):
        for timer, row in zip(timers, times, strict=True):
            row.append(timer())
        rounds += 1
    return tuple(_latency(point, row) for point, row in zip(points, times, strict=True))


def _latency(point: _Prefill | _Decode, times_ms: list[float]) -> LatencyPoint:
    low, middle, high = statistics.quantiles(times_ms, n=4)
    return LatencyPoint(
        batch=point.batch,
        context=point.context,
        median_ms=middle,
        iqr_ms=high - low,
        repeats=len(times_ms),
    )


def _peak_bytes(point: _Prefill | _Decode, model: LanguageModel, device: torch.device) -> int:
    """Most bytes alive at once while a point is prepared and run once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        point.prepare()()
        return int(torch.cuda.max_memory_allocated(device))
    with _LiveBytes() as live:
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
        point.prepare()()
    return int(live.peak)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators hand out while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._sizes: dict[int, int] = {}
        self._total = 0

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._total += storage.nbytes()
            self.peak = max(self.peak, self._total)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._total -= self._sizes.pop(key)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result
