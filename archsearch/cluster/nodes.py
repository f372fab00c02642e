"""The machines of a cluster: which may be used, how many trials fit, which are left alone and why.

A node on which trial after trial is lost is probably sick, and retries that land on it again lose
every trial of a study. So a node is left alone for the rest of a run once `STRIKES` different
trials in a row were lost on it; the same trial twice says more about the trial. Knows Ray's list of
nodes, but not Ray.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from archsearch.errors import ServiceError
from archsearch.spec import ResourcesSpec

STRIKES = 3


@dataclass(frozen=True)
class Node:
    """One machine, or one of several raylets on a machine."""

    node_id: str
    host: str
    has: Mapping[str, float]
    """Name of a resource -> how much of it there is, used or not."""

    @classmethod
    def from_ray(cls, entry: Mapping[str, Any]) -> Self:
        return cls(entry["NodeID"], entry["NodeManagerHostname"], entry["Resources"])

    def __str__(self) -> str:
        return f"{self.host} (node {self.node_id[:8]})"

    def room(self, resources: ResourcesSpec) -> int:
        """How many trials fit at once."""
        if resources.device is not None and f"accelerator_type:{resources.device}" not in self.has:
            return 0
        rooms = [math.floor(self.has.get("CPU", 0) / resources.cpus)] if resources.cpus else []
        if resources.gpus > 0:
            rooms.append(math.floor(self.has.get("GPU", 0) / resources.gpus + 1e-9))
        return min(rooms)


class Nodes:
    """The nodes as one run of a study sees them.

    Args:
        resources: what one trial asks for.
        alive: the nodes at the start.
        is_alone: whether a trial has the processors of its node for itself.

    Raises:
        ServiceError: none of them can ever run such a trial.
    """

    def __init__(
        self, resources: ResourcesSpec, alive: Iterable[Node], is_alone: bool = False
    ) -> None:
        self._resources = resources
        self._is_alone = is_alone
        self._alive = {node.node_id: node for node in alive}
        self._left_alone: dict[str, str] = {}
        self._lost_in_a_row: defaultdict[str, set[int]] = defaultdict(set)
        self._lost_on: defaultdict[int, set[str]] = defaultdict(set)
        if not self.usable:
            raise ServiceError(self.no_fit())

    @property
    def usable(self) -> set[str]:
        """Nodes that a trial can run on."""
        return {
            node.node_id
            for node in self._alive.values()
            if node.node_id not in self._left_alone and node.room(self._resources) > 0
        }

    @property
    def slots(self) -> int:
        """How many trials run at once, as of now."""
        rooms = [self._alive[node_id].room(self._resources) for node_id in self.usable]
        room = len(rooms) if self._is_alone else sum(rooms)
        return min(room, self._resources.parallel or room)

    def freest(self, number: int, busy: Collection[str]) -> Node:
        """The node that an attempt at a trial goes to if it is to be alone there.

        Args:
            busy: where attempts are or are going.
        """
        avoided = self.avoided(number)
        order = sorted(self.usable, key=lambda one: (one in busy, one in avoided, one))
        return self._alive[order[0]]

    def see(self, alive: Iterable[Node]) -> list[str]:
        """Take in which nodes there are now; return what is new, in sentences."""
        now, before = {node.node_id: node for node in alive}, self._alive
        self._alive = now
        left = [str(before[one]) + " has left" for one in before if one not in now]
        joined = [str(now[one]) + " has joined" for one in now if one not in before]
        return [f"{said} the cluster; trials at once now: {self.slots}" for said in left + joined]

    def is_alive(self, node_id: str) -> bool:
        return node_id in self._alive

    def is_left_alone(self, node_id: str) -> bool:
        return node_id in self._left_alone

    def avoided(self, number: int) -> frozenset[str]:
        """Nodes that the next attempt at a trial must not run on: those that are left alone and, if
        there are others, those that it was lost on."""
        sick = frozenset(self._left_alone)
        lost_on = frozenset(self._lost_on[number]) if number in self._lost_on else frozenset()
        return sick | lost_on if self.usable - lost_on else sick

    def leave_alone(self, node_id: str, why: str) -> str:
        """Use a node no more, and say so."""
        self._left_alone[node_id] = f"{self.name(node_id)} {why}"
        return f"{self._left_alone[node_id]}; it is left alone from now on"

    def note_lost(self, node_id: str, number: int, message: str) -> str | None:
        """A trial was lost on a node. Returns a sentence if it is left alone from now on."""
        self._lost_on[number].add(node_id)
        lost = self._lost_in_a_row[node_id]
        lost.add(number)
        if len(lost) < STRIKES or self.is_left_alone(node_id):
            return None
        return self.leave_alone(node_id, f"lost {len(lost)} trials in a row, the last: {message}")

    def note_well(self, node_id: str) -> None:
        """A trial came to its end on a node, whatever its result."""
        self._lost_in_a_row.pop(node_id, None)

    def name(self, node_id: str) -> str:
        node = self._alive.get(node_id)
        return str(node) if node is not None else f"node {node_id[:8]}"

    @property
    def all_left_alone(self) -> str:
        """Why no node is used any more, if those that are there are left alone; else empty."""
        fitting = [one for one in self._alive.values() if one.room(self._resources) > 0]
        return "; ".join(self._left_alone.get(node.node_id, "") for node in fitting)

    def no_fit(self) -> str:
        """Say what a trial asks for, and what comes nearest."""
        asked = self._resources
        wanted = f"{asked.cpus} CPUs"
        if asked.gpus > 0:
            wanted += f" and {asked.gpus:g} GPUs"
        if asked.device is not None:
            wanted += f" of type {asked.device}"

        def nearness(has: Mapping[str, float]) -> tuple[bool, float, float]:
            gpus = min(has.get("GPU", 0), asked.gpus)
            return f"accelerator_type:{asked.device}" in has, gpus, has.get("CPU", 0)

        nodes = [node.has for node in self._alive.values()]
        best = max(nodes, key=nearness, default={})
        types = sorted(
            {name.partition(":")[2] for has in nodes for name in has if "accelerator_type:" in name}
        )
        nearest = f"{best.get('CPU', 0):g} CPUs and {best.get('GPU', 0):g} GPUs"
        devices = f"; device types: {', '.join(types)}" if types else ""
        return (
            f"a trial asks for {wanted}, and no machine here can ever give that; the nearest has "
            f"{nearest}{devices}. Change `resources:`, or name a cluster with --address"
        )
