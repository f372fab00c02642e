"""Running trials on Ray, local or a cluster: submit, wait, cancel. The only module that knows Ray.

One trial is one task that streams its events as JSON. Ray's own retries are off: the coordinator
decides. A GPU trial gets a fresh process, so that the device's memory is really given back. Every
wait is bounded. A local Ray listens on the loopback only, says nothing, and dies with its driver.
Ray is imported when a cluster is opened, because it reads its settings at that moment.
"""

import importlib
import json
import math
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from archsearch.errors import FailureClass, ServiceError
from archsearch.messages import Event, TrialRequest, read_event, read_request
from archsearch.spec import ResourcesSpec

RUN_TRIAL = "archsearch.trial:run_trial"
"""`module:function` of what a worker runs: TrialRequest -> iterator of events."""

_UP = json.dumps({"kind": "up"})
_ALIVE = json.dumps({"kind": "alive"})
BEAT_S = 5.0
"""How long a worker says nothing at most."""
_FETCH_S = 60.0
_OBJECT_STORE_BYTES = 512 * 2**20
_LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # nothing of Ray's own on our output
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: listen on the loopback only
    "RAY_AUTH_MODE": "token",
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Up:
    """A worker took the attempt; its clock starts now."""

    token: str


@dataclass(frozen=True)
class Alive:
    """The worker of an attempt lives, whatever the trial does."""

    token: str


@dataclass(frozen=True)
class Answer:
    """One event of a trial."""

    token: str
    event: Event


@dataclass(frozen=True)
class Gone:
    """The attempt ended without a last word of the trial itself."""

    token: str
    failure: FailureClass
    message: str
    traceback: str = ""


Arrival = Up | Alive | Answer | Gone


class Cluster:
    """Ray, connected, with room for `slots` trials at once.

    Args:
        resources: what one trial asks for.
        address: of a running cluster, such as `auto`; None starts Ray on this machine.
        trial_function: `module:function` that workers run.

    Raises:
        ServiceError: Ray cannot be reached, or no machine of it can ever run such a trial.
    """

    def __init__(
        self, resources: ResourcesSpec, address: str | None, trial_function: str = RUN_TRIAL
    ) -> None:
        self._resources = resources
        self._function = trial_function
        self._is_local = address is None
        self._ray, self._is_ours = _connect(address, resources)
        try:
            self.slots = _slots(self._ray.nodes(), resources)
        except ServiceError:
            self.close()
            raise
        self._streams: dict[str, Any] = {}
        self._task = _task(self._ray, resources)

    @property
    def is_exclusive(self) -> bool:
        """True if a trial has its device for itself while it is profiled."""
        if self._resources.gpus > 0:
            return self._resources.gpus >= 1
        return self.slots == 1

    def submit(self, request: TrialRequest) -> None:
        """Hand one attempt to Ray. Its arrivals carry the request's token."""
        self._streams[request.token] = self._task.remote(
            self._function, request.model_dump_json(), self._resources.gpus > 0
        )

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Return what arrived, after at most `timeout_s` seconds; at once if there is something."""
        if not self._streams:
            return []
        tokens = {stream: token for token, stream in self._streams.items()}
        try:
            waiting = list(tokens)
            ready, _ = self._ray.wait(waiting, num_returns=1, timeout=timeout_s)
            if ready:
                ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
            return [arrival for stream in ready for arrival in self._take(tokens[stream], stream)]
        except (ConnectionError, self._ray.exceptions.RaySystemError) as error:
            raise ServiceError(f"Ray is gone: {_text(error)}") from error

    def cancel(self, token: str) -> None:
        """Stop an attempt at once. What it still had to say arrives, then `Gone`."""
        if token in self._streams:
            self._ray.cancel(self._streams[token], force=True)

    def close(self) -> None:
        """Let go of Ray; a local one stops, with whatever it runs."""
        if self._is_ours:
            self._ray.shutdown()

    def _take(self, token: str, stream: Any) -> Iterator[Arrival]:
        """The next item of a stream that has one."""
        try:
            text = self._ray.get(next(stream), timeout=_FETCH_S)
        except StopIteration:
            del self._streams[token]
            yield Gone(token, FailureClass.PLUGIN_ERROR, "the trial ended without a last event")
        except self._ray.exceptions.RayError as error:
            del self._streams[token]
            yield self._gone(token, error)
        else:
            if text == _UP:
                yield Up(token)
            else:
                yield Alive(token) if text == _ALIVE else self._read(token, text)

    def _read(self, token: str, text: str) -> Arrival:
        try:
            return Answer(token, read_event(text))
        except ValidationError as error:
            # JSON has no NaN and no infinity: what is not a finite number arrives as nothing.
            self.cancel(token)
            del self._streams[token]
            message = f"the trial's report cannot be read; is a value not finite? {error}"
            return Gone(token, FailureClass.PLUGIN_ERROR, message)

    def _gone(self, token: str, error: Exception) -> Gone:
        """Turn Ray's exception into a failure class.

        Raises ServiceError if no further attempt could end otherwise.
        """
        known = self._ray.exceptions
        if isinstance(error, known.OutOfMemoryError):
            return Gone(token, FailureClass.OUT_OF_MEMORY, _text(error))
        if isinstance(error, known.RuntimeEnvSetupError | known.TaskUnschedulableError):
            raise ServiceError(f"Ray cannot run trials: {_text(error)}") from error
        if self._is_local and isinstance(error, known.LocalRayletDiedError):
            raise ServiceError("Ray on this machine has died; run the same command again to go on")
        if not isinstance(error, known.RayTaskError):
            return Gone(token, FailureClass.LOST, _text(error))
        cause = error.cause
        if isinstance(cause, ImportError):
            raise ServiceError(
                f"a worker cannot import what it needs ({cause}); every machine of the cluster "
                "needs the same archsearch"
            ) from error
        failure = (
            FailureClass.OUT_OF_MEMORY
            if isinstance(cause, MemoryError)
            else FailureClass.PLUGIN_ERROR
        )
        return Gone(token, failure, f"{type(cause).__name__}: {cause}", _text(error))


def _connect(address: str | None, resources: ResourcesSpec) -> tuple[Any, bool]:
    """Return Ray, connected, and whether this process has to close it."""
    if address is not None and address.startswith("ray://"):
        raise ServiceError(
            f"{address} is Ray's client, which cannot stream results; run on a machine of the "
            "cluster with --address auto, or send this command there with `ray job submit`"
        )
    ray = _import_ray(is_local=address is None)
    if ray.is_initialized():
        return ray, False
    quiet = {
        "include_dashboard": False,
        "logging_level": "ERROR",
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        if address is None:
            gpus = None if resources.gpus > 0 else 0
            ray.init("local", num_gpus=gpus, object_store_memory=_OBJECT_STORE_BYTES, **quiet)
        else:
            del quiet["include_dashboard"]
            ray.init(address, **quiet)
    except Exception as error:  # a part of Ray that dies while it starts is a bare Exception
        where = f"at {address}" if address is not None else "on this machine"
        raise ServiceError(f"Ray cannot be reached {where}: {_text(error)}") from error
    return ray, True


def _import_ray(is_local: bool) -> ModuleType:
    if is_local:
        for name, value in _LOCAL_SETTINGS.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return importlib.import_module("ray")


def _slots(nodes: list[dict[str, Any]], resources: ResourcesSpec) -> int:
    """How many trials run at once. Raises ServiceError if not even one ever can."""
    fits = [_fit(node["Resources"], resources) for node in nodes if node["Alive"]]
    if sum(fits) == 0:
        raise ServiceError(
            _no_fit([node["Resources"] for node in nodes if node["Alive"]], resources)
        )
    return min(sum(fits), resources.parallel or sum(fits))


def _fit(node: dict[str, float], resources: ResourcesSpec) -> int:
    if resources.device is not None and f"accelerator_type:{resources.device}" not in node:
        return 0
    rooms = [math.floor(node.get("CPU", 0) / resources.cpus)] if resources.cpus else []
    if resources.gpus > 0:
        rooms.append(math.floor(node.get("GPU", 0) / resources.gpus + 1e-9))
    return min(rooms)


def _no_fit(nodes: list[dict[str, float]], resources: ResourcesSpec) -> str:
    wanted = f"{resources.cpus} CPUs"
    if resources.gpus > 0:
        wanted += f" and {resources.gpus:g} GPUs"
    if resources.device is not None:
        wanted += f" of type {resources.device}"
    best = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)), default={})
    types = sorted(
        {name.partition(":")[2] for node in nodes for name in node if "accelerator_type:" in name}
    )
    has = f"{best.get('CPU', 0):g} CPUs and {best.get('GPU', 0):g} GPUs"
    devices = f"; device types: {', '.join(types)}" if types else ""
    return (
        f"a trial asks for {wanted}, and no machine here can ever give that; the nearest has {has}"
        f"{devices}. Change `resources:`, or name a cluster with --address"
    )


def _task(ray: Any, resources: ResourcesSpec) -> Any:
    options: dict[str, Any] = {
        "num_returns": "streaming",
        "max_retries": 0,
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
    }
    if resources.gpus > 0:
        options["max_calls"] = 1
    if resources.device is not None:
        options["accelerator_type"] = resources.device
    return ray.remote(**options)(_stream)


def _stream(function: str, request: str, has_gpu: bool) -> Iterator[str]:
    """What a worker runs: the trial's events as JSON, after one word that it is up.

    The trial runs in a thread, so that the worker can show that it lives while an event is long in
    coming.
    """
    yield _UP
    if not has_gpu:
        # Ray leaves a machine's GPUs visible to tasks that asked for none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

    def play() -> None:
        try:
            for event in _load(function)(read_request(request)):
                said.put(event.model_dump_json())
            said.put(None)
        except BaseException as error:
            said.put(error)  # raised again where Ray sees it

    threading.Thread(target=play, name="archsearch-trial", daemon=True).start()
    while True:
        try:
            text = said.get(timeout=BEAT_S)
        except queue.Empty:
            text = _ALIVE
        if text is None:
            return
        if isinstance(text, BaseException):
            raise text
        yield text


def _load(function: str) -> Callable[[TrialRequest], Iterator[Event]]:
    module, _, name = function.partition(":")
    loaded: Callable[[TrialRequest], Iterator[Event]] = getattr(
        importlib.import_module(module), name
    )
    return loaded


def _text(error: BaseException) -> str:
    return _COLOURS.sub("", str(error)).strip()
