"""Implementations not written here, which tests compare ours with."""

import importlib.util
from importlib.metadata import distribution
from types import ModuleType


def fla_reference(op: str) -> ModuleType:
    """Load the plain-PyTorch reference of one op of `fla-core`, such as `gla`.

    By its file: importing the package needs Triton, which an installation for CPUs leaves out.
    """
    path = distribution("fla-core").locate_file(f"fla/ops/{op}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op.replace('/', '_')}", str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
