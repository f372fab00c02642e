"""Starting Ray on this machine, or finding one that runs.

A local Ray listens on the loopback only, says nothing, and dies with its driver. Ray is imported
when a cluster is opened, because it reads its settings at that moment.
"""

import importlib
import os
import re
import secrets
from types import ModuleType
from typing import Any

from archsearch.errors import ServiceError
from archsearch.spec import ResourcesSpec

_OBJECT_STORE_BYTES = 512 * 2**20
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # nothing of Ray's own on our output
}
_LOCAL_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: listen on the loopback only
    "RAY_AUTH_MODE": "token",
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def connect(address: str | None, resources: ResourcesSpec) -> tuple[Any, bool]:
    """Return Ray, connected, and whether this process has to close it.

    Raises:
        ServiceError: Ray cannot be reached, or not in this way.
    """
    meant = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if meant is not None and meant.startswith("ray://"):
        raise ServiceError(
            f"{meant} is Ray's client, which cannot stream results; run on a machine of the "
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
        raise ServiceError(f"Ray cannot be reached {where}: {words(error)}") from error
    return ray, True


def _import_ray(is_local: bool) -> ModuleType:
    for name, value in (_SETTINGS | (_LOCAL_SETTINGS if is_local else {})).items():
        os.environ.setdefault(name, value)
    if is_local:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return importlib.import_module("ray")


def words(error: BaseException) -> str:
    """What an error of Ray says, without the colours it paints it in."""
    return _COLOURS.sub("", str(error)).strip()
