"""What a kernel family is: its backends, the inputs it is checked with, and the `auto` table.

Backends are named as text and imported when first called, so that an optional GPU library stays
optional. Knows nothing of any family's mathematics.
"""

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator

REFERENCE = "reference"
"""The backend every family has: the definition, torch only, on any device."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the inputs of a check. `state` asks for a random state to continue from."""

    batch: int
    tokens: int
    heads: int
    head_size: int
    state: bool
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """One call of an op: its floating-point tensors by keyword, and its other keywords.

    Every tensor in `tensors` is differentiable; a check compares the gradient of each. Those named
    in `wide` (states, gates) are at least fp32, whatever the dtype of the others.
    """

    tensors: Mapping[str, Tensor]
    options: Mapping[str, object]
    wide: frozenset[str] = frozenset()

    def cast(self, dtype: torch.dtype, device: torch.device | str) -> "Call":
        """Return the same call in another dtype, on another device. Options keep their dtype."""
        wide = accumulator(dtype)
        tensors = {
            name: value.to(device, wide if name in self.wide else dtype)
            for name, value in self.tensors.items()
        }
        options = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return Call(tensors, options, self.wide)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kernel family.

    `op` is the public function; `backends` maps a name to `"module:function"`; `make_inputs`
    returns fp64 inputs on the CPU; `auto` maps (device type, dtype) to the backend that `resolve`
    picks, and what it does not list is the reference; `instead` names what is picked where a caller
    does not permit a backend; `only_on` names the device type of backends that run on no other;
    `borrowed` names the family whose backend it is, and whose check stands for it; `operands` the
    dtype that a backend rounds the factors of its products to, for inputs in half precision.
    """

    name: str
    op: Callable[..., Any]
    backends: Mapping[str, str]
    make_inputs: Callable[[Sizes], Call]
    auto: Mapping[tuple[str, torch.dtype], str]
    instead: Mapping[str, str] = field(default_factory=dict)
    only_on: Mapping[str, str] = field(default_factory=dict)
    borrowed: Mapping[str, str] = field(default_factory=dict)
    operands: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert REFERENCE in self.backends and set(self.auto.values()) <= set(self.backends)
        assert set(self.only_on) <= set(self.backends) - {REFERENCE}

    def backends_on(self, device_type: str) -> tuple[str, ...]:
        """Backends that run on a type of device."""
        return tuple(
            name for name in self.backends if self.only_on.get(name, device_type) == device_type
        )

    def load(self, backend: str) -> Callable[..., Any]:
        """Import one backend and return its function.

        Raises:
            LookupError: no such backend; the text lists those that exist.
        """
        if backend not in self.backends:
            raise LookupError(
                f"kernel '{self.name}' has no backend '{backend}'; it has: "
                + ", ".join(self.backends)
            )
        return _load(self.backends[backend])


@cache
def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


@cache
def families() -> tuple[Family, ...]:
    """Every family, by name. Imports the families, none of their backends."""
    package = importlib.import_module("archsearch_kernels")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    return tuple(importlib.import_module(f"archsearch_kernels.{name}").FAMILY for name in names)


def family(name: str) -> Family:
    """Return one family.

    Raises:
        LookupError: no such family; the text lists those that exist.
    """
    for candidate in families():
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in families())
    raise LookupError(f"no kernel family '{name}'; there are: {known}")


def resolve(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    allowed: Collection[str] | None = None,
) -> str:
    """Return the backend that `auto` means for a family on a kind of device, from a fixed table.

    `allowed` are the backends a caller permits (None: all). A table entry that is not permitted
    gives what the family names instead, or the reference; nothing is probed or timed.

    Raises:
        LookupError: no such family.
    """
    one = family(name)
    choice = one.auto.get((device_type, dtype), REFERENCE)
    while allowed is not None and choice not in allowed and choice != REFERENCE:
        choice = one.instead.get(choice, REFERENCE)
    return choice
