"""`embed_norm` and `residual_norm` compiled for a device, at the shapes that they are made for.

Run by hand on a machine with a CUDA device: `pytest -m gpu tests/gpu/test_entry.py`. Imports the
kernels alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from archsearch_kernels.embed_norm import embed_norm
from archsearch_kernels.residual_norm import residual_norm
from torch import Tensor
from torch.func import vmap

pytestmark = pytest.mark.gpu

GRADIENT = 4e-3
"""Relative error of bf16 results. A rounding is 1.7e-3 root mean square, and there are two."""
TABLE = 6e-3
"""Of the table's gradient, whose terms are rounded before they are added up, too."""


SHAPES = ((16, 16_384, 128), (1, 16_384, 64), (3, 1_001, 100), (2, 4_096, 512))
"""Members, rows and width."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def outer(x: Tensor) -> Tensor:
    """The first and the last member: the reference in fp64 is asked for no others."""
    return x[:: max(1, len(x) - 1)]


def results(one: Callable[..., Any], *given: Tensor, exact: bool, keys: Tensor) -> list[Tensor]:
    """Results and gradients of an op that is mapped over members; `exact`, in fp64 of the outer."""
    kept = [outer(x).double() if exact else x for x in given]
    leaves = [x.detach().requires_grad_() for x in kept]
    found = vmap(one)(outer(keys) if exact else keys, *leaves)
    rows = (len(keys), *found[0].shape[1:])
    weights = [normal(*rows, seed=seed) for seed in range(len(found))]
    weights = [outer(x).double() if exact else x for x in weights]
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, weights)]


def residual(members: int, rows: int, width: int, exact: bool = False) -> list[Tensor]:
    backend, keys = "reference" if exact else "triton", torch.arange(members, device="cuda")
    r, y = (normal(members, rows, width, seed=seed) for seed in (1, 2))
    weight, bias = (normal(members, width, seed=seed) for seed in (3, 4))

    def one(_: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return residual_norm(*given, backend=backend)

    return results(one, r, y, weight, bias, exact=exact, keys=keys)


def embedded(members: int, rows: int, width: int, exact: bool = False) -> list[Tensor]:
    backend, keys = "reference" if exact else "triton", torch.arange(members, device="cuda") + 2**40
    generator = torch.Generator("cuda").manual_seed(rows)
    tokens = torch.randint(0, 8_192, (rows,), generator=generator, device="cuda")
    tokens[: rows * 3 // 4] = 7  # one token is most of the batch, as a filler is
    table, weight = normal(members, 8_192, width), normal(members, width)
    bias = normal(members, width, seed=9)

    def one(key: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return embed_norm(tokens, *given, share=0.1, key=key, backend=backend)

    return results(one, table, weight, bias, exact=exact, keys=keys)


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    pairs = zip(found, truth, strict=True)
    return [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs]


@pytest.mark.parametrize("op", [residual, embedded])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_real_shapes_agree_with_the_reference_and_repeat(
    op: Callable[..., list[Tensor]], shape: tuple[int, int, int]
) -> None:
    found, truth = op(*shape), op(*shape, exact=True)
    assert max(errors([outer(x) for x in found], truth)) < (TABLE if op is embedded else GRADIENT)
    assert all(map(torch.equal, op(*shape), found))


@pytest.mark.parametrize("op", [residual, embedded])
def test_a_call_can_be_captured(op: Callable[..., list[Tensor]]) -> None:
    """Both passes; a host synchronisation would end the capture."""
    tokens = torch.arange(4_096, device="cuda").clamp_max(1_000)
    shapes = ((4, 8_192, 128),) if op is embedded else ((4, 4_096, 128),) * 2
    leaves = [normal(*shape).requires_grad_() for shape in (*shapes, (4, 128), (4, 128))]

    def one(*given: Tensor) -> tuple[Tensor, Tensor]:
        if op is residual:
            return residual_norm(*given, backend="triton")
        return embed_norm(tokens, *given, backend="triton")

    def step() -> list[Tensor]:
        found = vmap(one)(*leaves)
        total = sum((x.float().square().sum() for x in found), torch.zeros((), device="cuda"))
        return [*found, *torch.autograd.grad(total, leaves)]

    wanted = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))


def test_offsets_beyond_32_bits() -> None:
    """130 x 131,072 x 128 = 2.2e9 numbers; the last member is what it is alone."""
    r, weight = normal(130, 131_072, 128), normal(130, 128)
    norm = vmap(lambda *given: residual_norm(*given, backend="triton"))
    s, x = norm(r, r, weight, weight)
    alone = residual_norm(r[-1], r[-1], weight[-1], weight[-1], backend="triton")
    assert torch.equal(s[-1], alone[0]) and torch.equal(x[-1], alone[1])
