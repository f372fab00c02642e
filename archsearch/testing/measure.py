"""Measures the contract is judged by: how much a rounding matters, and what a module holds.

Two right ways to compute one thing differ by roundings, and how much a rounding matters depends on
the mixer. So the tolerance is measured: the unit is the change of a result when every input and
parameter is off by one rounding.

Shape suffixes: B batch, T tokens, D model width.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from archsearch.mixer import Mixer, rows

Run = Callable[[nn.Module, Tensor], Sequence[Tensor]]
"""What is computed: (module, input) -> results."""


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.detach().double().square().mean().sqrt())


def rounding_changes(
    run: Run, module: nn.Module, x_BTD: Tensor, dtype: torch.dtype
) -> tuple[float, ...]:
    """RMS change of each result when every input and parameter is off by one rounding of `dtype`.

    Never less than half the largest rounding of the result itself.
    """
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(dtype).eps

    def rounded(tensor: Tensor) -> Tensor:
        noise = torch.rand(tensor.shape, generator=generator) - 0.5
        return tensor.detach() * (1 + unit * noise)

    moved = copy.deepcopy(module)
    for parameter in moved.parameters():
        parameter.data = rounded(parameter)
    results = zip(run(module, x_BTD), run(moved, rounded(x_BTD)), strict=True)
    return tuple(max(rms(after - before), unit * rms(before) / 4) for before, after in results)


def forward(module: nn.Module, x_BTD: Tensor) -> tuple[Tensor]:
    """The output, without gradients."""
    with torch.no_grad():
        return (module(x_BTD),)


def gradients(module: nn.Module, x_BTD: Tensor) -> tuple[Tensor, ...]:
    """Gradients of half the summed squares of the output, parameter by parameter."""
    y_BTD = module(x_BTD)
    return torch.autograd.grad(y_BTD.square().sum() / 2, list(module.parameters()))


def runs_at(at_BK: Tensor) -> tuple[Run, Run]:
    """Outputs at positions as a mixer gives them, and picked from all; of both also the gradients
    of half their summed squares by the input and each parameter."""

    def run(module: nn.Module, x_BTD: Tensor, picks: bool) -> tuple[Tensor, ...]:
        assert isinstance(module, Mixer)
        leaf = x_BTD.detach().requires_grad_()
        y_BKD = rows(module(leaf), at_BK) if picks else module.outputs_at(leaf, at_BK)
        leaves = [leaf, *module.parameters()]
        return y_BKD.detach(), *torch.autograd.grad(y_BKD.square().sum() / 2, leaves)

    return partial(run, picks=False), partial(run, picks=True)


def inputs(batch: int, length: int, width: int, seed: int = 0) -> Tensor:
    """Random sequences."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randn(batch, length, width, generator=generator)


def segmentations(length: int, prefix_len: int) -> Iterator[list[int]]:
    """A few ways to cut a sequence after its prefix: token by token, in threes, and unevenly."""
    first = min(prefix_len, length)
    rest = length - first
    begun = [first] if first else []
    yield begun + [1] * rest
    yield begun + [3] * (rest // 3) + [rest % 3] * (rest % 3 > 0)
    if rest > 3:
        yield [first + rest // 2, 1, rest - rest // 2 - 1]


def in_segments(module: Mixer, x_BTD: Tensor, cuts: list[int]) -> Tensor:
    """Mix segments of these lengths one after the other, from the empty state."""
    state, parts = module.init_state(len(x_BTD), x_BTD.shape[1], x_BTD.dtype, "cpu"), []
    for segment in x_BTD.split(cuts, dim=1):
        part, state = module.mix(segment, state)
        parts.append(part)
    return torch.cat(parts, dim=1)


def in_steps(module: Mixer, x_BTD: Tensor, first: int) -> Tensor:
    """Mix the `first` tokens at once and the others one by one, from the empty state."""
    state, parts = module.init_state(len(x_BTD), x_BTD.shape[1], x_BTD.dtype, "cpu"), []
    if first:
        part, state = module.mix(x_BTD[:, :first], state)
        parts.append(part)
    for x_BD in x_BTD[:, first:].unbind(1):
        y_BD, state = module.step(x_BD, state)
        parts.append(y_BD[:, None])
    return torch.cat(parts, dim=1)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Copies of every tensor a module holds, by place: buffers, attributes and containers alike."""

    def walk(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            yield path, value.detach().clone()
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(f"{path}.{key}", item)
        elif isinstance(value, list | tuple | set):
            for i, item in enumerate(value):
                yield from walk(f"{path}[{i}]", item)

    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute != "_modules":
                yield from walk(".".join(filter(None, (name, attribute.lstrip("_")))), value)
