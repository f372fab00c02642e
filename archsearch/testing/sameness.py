"""Two configs have one canonical form if and only if nothing tells them apart.

One field of a config is changed at a time, and all that a trial could see of the two is compared:
costs first, and only if they agree what their modules compute.

Shape suffixes: B batch, T tokens, D model width.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from archsearch.errors import FOREIGN_FAULTS
from archsearch.mixer import Mixer
from archsearch.registry import mixer_fields
from archsearch.space import Field, Value

CONTEXTS = (1, 7, 33, 1024, 1 << 20)
"""Contexts at which costs are compared; the longest is beyond every window that is searched."""

Build = Callable[[Mixer.Config], Mixer]
"""Makes the module of a config with all its parameters from one seed."""


def complaints(mixer: str, config: Mixer.Config, build: Build, x_BTD: Tensor) -> Iterator[str]:
    """What is wrong with the canonical form of a config and of those that differ in one field."""
    usual = config.canonical()
    if usual.canonical() != usual:
        yield f"canonical() of {usual} is {usual.canonical()}; a canonical form stays as it is"
    told = "" if usual.parts != config.parts else _difference(config, usual, build, x_BTD)
    if told:
        yield f"{told} of the canonical form {usual} is another"
    for change, other in _neighbours(mixer, config):
        told = _difference(config, other, build, x_BTD)
        if told and other.canonical() == usual:
            yield f"{change} has the same canonical form, but {told} is another"
        if not told and other.canonical() != usual:
            yield f"{change} makes no difference; `Config.canonical` must say so"


def _neighbours(mixer: str, config: Mixer.Config) -> Iterator[tuple[str, Mixer.Config]]:
    """Configs that differ from one in a single field, and in what; excluded ones are left out."""
    for name, field in mixer_fields(mixer).items():
        for value in dict.fromkeys(_tried(field, getattr(config, name))):
            if value == getattr(config, name):
                continue
            changed: dict[str, Any] = {name: value}
            with contextlib.suppress(*FOREIGN_FAULTS):  # that corners build is another test
                yield f"{name}={value}", replace(config, **changed)


def _tried(field: Field, now: Value) -> tuple[Value, ...]:
    """Values of a field that should each make a difference if the field makes one."""
    if field.domain is not None:
        return (field.default, field.candidates[0], field.candidates[-1])
    if isinstance(now, bool):
        return (not now,)
    if isinstance(now, str):
        return (field.default,)
    return (field.default, now + 1, 2 * now, now / 2 if isinstance(now, float) else now // 2)


def _difference(one: Mixer.Config, other: Mixer.Config, build: Build, x_BTD: Tensor) -> str:
    """The first thing that tells two configs apart; empty if nothing does."""
    for context in CONTEXTS:
        for what, costs in (("state_spec", _states), ("state_range", _range), ("flops", _flops)):
            if costs(one, context) != costs(other, context):
                return f"{what} at context {context}"
    if one.prefix_len != other.prefix_len:
        return "prefix_len"
    modules = [build(config) for config in (one, other)]
    shapes = [{name: p.shape for name, p in module.state_dict().items()} for module in modules]
    if shapes[0] != shapes[1]:
        return "parameters"
    found = _computed(modules[0], modules[1], x_BTD)
    return next((name for name, is_same in found if not is_same), "")


def _states(config: Mixer.Config, context: int) -> object:
    return config.state_spec(context, torch.float32)


def _range(config: Mixer.Config, context: int) -> object:
    return config.state_range(context, torch.float32), config.zoology_state_elements(context)


def _flops(config: Mixer.Config, context: int) -> object:
    return config.flops(context)


def _computed(first: Mixer, second: Mixer, x_BTD: Tensor) -> Iterator[tuple[str, bool]]:
    """What two modules put out and the gradients of its squares, and whether they are the same."""
    outputs = [module(x_BTD) for module in (first, second)]
    yield "the output", _is_same(outputs[0], outputs[1])
    for module, y_BTD in zip((first, second), outputs, strict=True):
        module.zero_grad()
        y_BTD.square().sum().backward()
    for (name, mine), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        if mine.grad is not None and theirs.grad is not None:
            yield f"the gradient of {name}", _is_same(mine.grad, theirs.grad)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
