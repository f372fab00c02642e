"""Submitting trials to Ray and hearing of them.

One trial is one task that streams its events as JSON. Ray's own retries are off: the coordinator
decides. A GPU trial gets a fresh process, so that the device's memory is really given back. Ray
chooses the node, by a label selector that leaves out those in `nodes` that must not be used. A task
that no node can run any more would wait for ever, and one whose node is gone may keep a worker that
nobody hears: both are looked for here. Every wait is bounded.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from archsearch.cluster import greeting, process
from archsearch.cluster.arrivals import Alive, Answer, Arrival, Gone, News, Returned, Up
from archsearch.cluster.connection import connect, words
from archsearch.cluster.nodes import Node, Nodes
from archsearch.cluster.worker import ALIVE, RUN_TRIAL
from archsearch.errors import FailureClass, ServiceError
from archsearch.messages import (
    Failed,
    Profiled,
    Progress,
    Stopped,
    TrialRequest,
    read_event,
)
from archsearch.spec import ResourcesSpec

LOOK_S = 2.0
"""How often the nodes are looked at."""
NO_NODE_S = 60.0
"""How long a study waits for a node to come back when there is none."""
_FETCH_S = 60.0


@dataclass
class _Attempt:
    """One attempt that Ray has."""

    number: int
    stream: Any
    avoided: frozenset[str]
    chosen: str | None
    """The one node that it may run on, if one was chosen."""
    node_id: str | None = None
    """Where it runs; None until its worker has said so."""
    is_cancelled: bool = False


class Cluster:
    """Ray, connected, with room for `slots` trials at once.

    Args:
        resources: what one trial asks for.
        address: of a running cluster, such as `auto`; None starts Ray on this machine.
        trial_function: `module:function` that workers run.
        is_timed: whether the study's latencies count, so that a trial must have its device for
            itself: its GPUs, which Ray gives to nobody else, or all processors of its node.

    Raises:
        ServiceError: Ray cannot be reached, or no machine of it can ever run such a trial.
    """

    def __init__(
        self,
        resources: ResourcesSpec,
        address: str | None,
        trial_function: str = RUN_TRIAL,
        is_timed: bool = False,
    ) -> None:
        self._resources = resources
        self._is_alone = is_timed and resources.gpus == 0
        self._function = trial_function
        self._is_local = address is None
        self._ray, self._is_ours = connect(address, resources)
        try:
            self._nodes = Nodes(resources, self._alive_nodes(), self._is_alone)
        except ServiceError:
            self.close()
            raise
        self._code = greeting.code_versions()
        self._attempts: dict[str, _Attempt] = {}
        self._task = _task(self._ray, resources)
        self._looked = self._had_node = time.monotonic()
        self._news: list[Arrival] = []

    @property
    def slots(self) -> int:
        """How many trials run at once; follows the nodes that join, leave or are left alone."""
        return self._nodes.slots

    @property
    def is_exclusive(self) -> bool:
        """True if a trial has its device for itself while it is profiled."""
        return self._is_alone or self._resources.gpus >= 1

    def submit(self, request: TrialRequest) -> None:
        """Hand one attempt to Ray. Its arrivals carry the request's token."""
        avoided, chosen = self._nodes.avoided(request.number), None
        task = self._task
        if self._is_alone:
            busy = {one.chosen for one in self._attempts.values() if one.chosen is not None}
            node = self._nodes.freest(request.number, busy)
            chosen, cpus = node.node_id, node.has["CPU"]
            task = task.options(num_cpus=cpus, label_selector={"ray.io/node-id": chosen})
        elif avoided:
            task = task.options(label_selector={"ray.io/node-id": f"!in({','.join(avoided)})"})
        stream = task.remote(
            self._code, self._function, request.model_dump_json(), self._resources.gpus
        )
        self._attempts[request.token] = _Attempt(request.number, stream, avoided, chosen)

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Return what arrived, after at most `timeout_s` seconds; at once if there is something.

        Raises:
            ServiceError: Ray is gone, or no node is left that may be used.
        """
        try:
            self._look()
            self._listen(0.0 if self._news else timeout_s)
        except (ConnectionError, self._ray.exceptions.RaySystemError) as error:
            raise ServiceError(f"Ray is gone: {words(error)}") from error
        arrivals, self._news = self._news, []
        return arrivals

    def cancel(self, token: str, lost: str = "") -> None:
        """Stop an attempt at once. What it still had to say arrives, then `Gone`.

        Args:
            lost: what happened to it, if that is its machine's fault.
        """
        if (attempt := self._attempts.get(token)) is not None:
            if lost:
                self._note_lost(attempt, lost)
            attempt.is_cancelled = True
            self._ray.cancel(attempt.stream, force=True)

    def refuse(self, token: str, why: str) -> None:
        """Leave the machine of an attempt alone, and give back what has not got far there."""
        attempt = self._attempts[token]
        assert attempt.node_id is not None
        self._leave_alone(attempt.node_id, why)
        self._return(token, attempt)

    def close(self) -> None:
        """Let go of Ray; a local one stops, with whatever it runs."""
        if self._is_ours:
            self._ray.shutdown()

    def _alive_nodes(self) -> list[Node]:
        return [Node.from_ray(entry) for entry in self._ray.nodes() if entry["Alive"]]

    def _look(self) -> None:
        """Every few seconds: which nodes are there, and what that means for the attempts."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self._news += map(News, self._nodes.see(self._alive_nodes()))
        for token, attempt in list(self._attempts.items()):
            if attempt.node_id is None and not self._may_start(attempt):
                self._drop(token)
                self._news.append(Returned(token, "no machine is left that it could start on"))
            elif attempt.node_id is not None and not self._nodes.is_alive(attempt.node_id):
                self._drop(token)
                self._news.append(Gone(token, FailureClass.LOST, "its machine left the cluster"))
        self._check_nodes()

    def _may_start(self, attempt: _Attempt) -> bool:
        usable = self._nodes.usable
        return attempt.chosen in usable if attempt.chosen else bool(usable - attempt.avoided)

    def _check_nodes(self) -> None:
        """Raise ServiceError if nothing runs and nothing ever will."""
        if self._nodes.usable:
            self._had_node = time.monotonic()
        elif all(attempt.is_cancelled for attempt in self._attempts.values()):
            if why := self._nodes.all_left_alone:
                raise ServiceError(f"no machine is left for trials. {why}")
            if time.monotonic() - self._had_node > NO_NODE_S:
                raise ServiceError(self._nodes.no_fit())

    def _listen(self, timeout_s: float) -> None:
        """Take the next item of every attempt that has one."""
        if not self._attempts:
            if not self._nodes.usable:
                time.sleep(timeout_s)  # for a node
            return
        tokens = {attempt.stream: token for token, attempt in self._attempts.items()}
        waiting = list(tokens)
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for stream in ready:
            self._take(tokens[stream])

    def _take(self, token: str) -> None:
        attempt = self._attempts[token]
        try:
            text = self._ray.get(next(attempt.stream), timeout=_FETCH_S)
        except StopIteration:
            del self._attempts[token]
            message = "the trial ended without a last event"
            self._news.append(Gone(token, FailureClass.PLUGIN_ERROR, message))
        except self._ray.exceptions.RayError as error:
            del self._attempts[token]
            self._end(token, attempt, error)
        else:
            if attempt.node_id is None:
                self._greeted(token, attempt, json.loads(text))
            else:
                self._news.append(Alive(token) if text == ALIVE else self._read(token, text))

    def _greeted(self, token: str, attempt: _Attempt, word: dict[str, Any]) -> None:
        """A worker is up. See whether it may run the trial."""
        attempt.node_id = node_id = str(word["node"])
        if not self._nodes.is_left_alone(node_id):
            if word["code"] == self._code:
                self._news.append(Up(token))
                return
            theirs = _versions(word["code"], word["others"])
            ours = _versions(self._code, greeting.other_versions())
            self._leave_alone(node_id, f"has {theirs}, and this coordinator has {ours}")
        self._return(token, attempt)

    def _leave_alone(self, node_id: str, why: str) -> None:
        if not self._nodes.is_left_alone(node_id):
            self._news.append(News(self._nodes.leave_alone(node_id, why)))

    def _return(self, token: str, attempt: _Attempt) -> None:
        """Give an attempt back that reached a node which is left alone."""
        assert attempt.node_id is not None
        self._drop(token)
        name = self._nodes.name(attempt.node_id)
        self._news.append(Returned(token, f"{name} is left alone"))
        self._check_nodes()

    def _drop(self, token: str) -> None:
        """Stop an attempt and listen to it no more."""
        self.cancel(token)
        self._attempts.pop(token, None)

    def _read(self, token: str, text: str) -> Arrival:
        attempt = self._attempts[token]
        try:
            event = read_event(text)
        except ValidationError as error:
            # JSON has no NaN and no infinity: what is not a finite number arrives as nothing.
            self._drop(token)
            message = f"the trial's report cannot be read; is a value not finite? {error}"
            return Gone(token, FailureClass.PLUGIN_ERROR, message)
        if isinstance(event, Failed) and event.failure.is_retried:
            self._note_lost(attempt, event.message)
        elif not isinstance(event, Progress):
            assert attempt.node_id is not None
            self._nodes.note_well(attempt.node_id)
        if isinstance(event, Profiled | Stopped | Failed) and self._resources.gpus > 0:
            self._drop(token)  # all is said: see `process.await_end`
        return Answer(token, event)

    def _note_lost(self, attempt: _Attempt, message: str) -> None:
        """Count a loss against the node, unless it was ordered or nobody knows the node."""
        if attempt.node_id is None or attempt.is_cancelled:
            return
        said = self._nodes.note_lost(attempt.node_id, attempt.number, message)
        if said is not None:
            self._news.append(News(said))

    def _end(self, token: str, attempt: _Attempt, error: Exception) -> None:
        """Turn Ray's exception into the end of an attempt.

        Raises ServiceError if no further attempt could end otherwise.
        """
        known = self._ray.exceptions
        if isinstance(error, known.RuntimeEnvSetupError):
            raise ServiceError(f"Ray cannot run trials: {words(error)}") from error
        if self._is_local and isinstance(error, known.LocalRayletDiedError):
            raise ServiceError("Ray on this machine has died; run the same command again to go on")
        cause = error.cause if isinstance(error, known.RayTaskError) else None
        if isinstance(cause, ImportError) and attempt.node_id is not None:
            self._leave_alone(
                attempt.node_id,
                f"cannot import what a worker needs ({cause}); every machine of the cluster needs "
                "the same archsearch",
            )
            self._return(token, attempt)
            return
        failure = _failure(error, cause, known)
        message = words(error) if cause is None else f"{type(cause).__name__}: {cause}"
        if failure.is_retried:
            self._note_lost(attempt, message)
        traceback = "" if cause is None else words(error)
        self._news.append(Gone(token, failure, message, traceback))


def _failure(error: Exception, cause: BaseException | None, known: Any) -> FailureClass:
    if isinstance(error, known.OutOfMemoryError) or isinstance(cause, MemoryError):
        return FailureClass.OUT_OF_MEMORY
    if not isinstance(error, known.RayTaskError) or isinstance(cause, OSError):
        return FailureClass.LOST
    return FailureClass.PLUGIN_ERROR


def _versions(code: dict[str, str], others: dict[str, str]) -> str:
    said = ", ".join(f"{name} {version}" for name, version in sorted(code.items()))
    return f"{said} ({', '.join(f'{name} {version}' for name, version in others.items())})"


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
    for module in (greeting, process):
        ray.cloudpickle.register_pickle_by_value(module)
    return ray.remote(**options)(greeting.greet)
