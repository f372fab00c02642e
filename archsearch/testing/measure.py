"""Measures the contract is judged by: how much a rounding matters, and what a module holds.

Two right ways to compute one thing differ by roundings, and how much a rounding matters depends on
the mixer. So the tolerance is measured: the unit is the change of a result when every input and
parameter is off by one rounding.

Shape suffixes: B batch, T tokens, D model width.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

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
