"""The first word of a worker: where it runs, and with which versions.

Ray sends this module to workers by value, so that a machine whose archsearch is missing or another
can still say so. Until the versions are known to agree it imports the standard library only,
and `process`, which travels with it.
"""

import importlib
import json
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

from archsearch.cluster.process import await_end, prepare

MISSING = "none"


def code_versions() -> dict[str, str]:
    """Version of archsearch and of every installed package with mixers, by name."""
    points = entry_points(group="archsearch.mixers")
    found = {point.dist.name: point.dist.version for point in points if point.dist is not None}
    try:
        found["archsearch"] = importlib.import_module("archsearch").__version__
    except ImportError:
        found["archsearch"] = MISSING
    return found


def other_versions() -> dict[str, str]:
    """Of what else a result may depend on: Python, torch and Ray."""
    found = {"Python": platform.python_version()}
    for name in ("torch", "ray"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = MISSING
    return found


def greet(wanted: dict[str, str], function: str, request: str, gpus: float) -> Iterator[str]:
    """What Ray runs: the first word, then, if this is the `wanted` code, the trial's events."""
    code = code_versions()
    node = importlib.import_module("ray").get_runtime_context().get_node_id()
    yield json.dumps({"node": node, "code": code, "others": other_versions()})
    if code == wanted:
        prepare(gpus)
        worker = importlib.import_module("archsearch.cluster.worker")
        yield from worker.events(function, request)
        await_end(gpus)
