"""`embed_norm` and `residual_norm` compiled for a device, at the shapes that they are made for.

Run by hand on a machine with a CUDA device: `pytest -m gpu tests/gpu/test_entry.py`. Imports the
kernels alone.
"""

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


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def residual(backend: str, dtype: torch.dtype, rows: int, width: int, members: int) -> list[Tensor]:
    r, y = (normal(members, rows, width, seed=seed) for seed in (1, 2))
    weight, bias = (normal(members, width, seed=seed) for seed in (3, 4))
    leaves = [x.to(dtype).requires_grad_() for x in (r, y, weight, bias)]
    found = vmap(lambda *given: residual_norm(*given, backend=backend))(*leaves)
    weights = [normal(*x.shape, seed=seed).to(dtype) for seed, x in enumerate(found)]
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, weights)]


def embedded(backend: str, dtype: torch.dtype, rows: int, width: int, members: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows)
    tokens = torch.randint(0, 8_192, (rows,), generator=generator, device="cuda")
    tokens[: rows // 4] = 7  # one token comes very often
    keys = torch.arange(members, device="cuda") + 2**40
    table, weight, bias = (
        normal(members, 8_192, width),
        normal(members, width),
        normal(members, width, seed=9),
    )
    leaves = [x.to(dtype).requires_grad_() for x in (table, weight, bias)]

    def one(key: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return embed_norm(tokens, *given, share=0.1, key=key, backend=backend)

    found = vmap(one)(keys, *leaves)
    weights = [normal(*x.shape, seed=seed).to(dtype) for seed, x in enumerate(found)]
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, weights)]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    pairs = zip(found, truth, strict=True)
    return [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs]


@pytest.mark.parametrize("op", [residual, embedded])
@pytest.mark.parametrize("width", [64, 100, 128, 512])
@pytest.mark.parametrize(("members", "rows"), [(16, 16_384), (1, 16_384), (3, 1_001)])
def test_real_shapes_agree_with_the_reference_and_repeat(
    op: object, members: int, rows: int, width: int
) -> None:
    assert callable(op)
    found = op("triton", torch.bfloat16, rows, width, members)
    truth = op("reference", torch.float64, rows, width, members)
    assert max(errors(found, truth)) < (TABLE if op is embedded else GRADIENT)
    for again, before in zip(
        op("triton", torch.bfloat16, rows, width, members), found, strict=True
    ):
        assert torch.equal(again, before)


@pytest.mark.parametrize("op", [residual, embedded])
def test_a_call_can_be_captured(op: object) -> None:
    assert callable(op)
    wanted = op("triton", torch.bfloat16, 4_096, 128, 4)
    tensors = [normal(4, 4_096, 128, seed=seed).requires_grad_() for seed in (1, 2)]
    weights = [normal(4, 128, seed=seed).requires_grad_() for seed in (3, 4)]
    norm = vmap(lambda *given: residual_norm(*given, backend="triton"))
    norm(*tensors, *weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        s, x = norm(*tensors, *weights)
        gradients = torch.autograd.grad((s.float().sum() + x.float().sum()), [*tensors, *weights])
    graph.replay()
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in (s, x, *gradients, *wanted))


def test_offsets_beyond_32_bits() -> None:
    """130 x 131,072 x 128 = 2.2e9 numbers; the last member is what it is alone."""
    r, weight = normal(130, 131_072, 128), normal(130, 128)
    norm = vmap(lambda *given: residual_norm(*given, backend="triton"))
    s, x = norm(r, r, weight, weight)
    alone = residual_norm(r[-1], r[-1], weight[-1], weight[-1], backend="triton")
    assert torch.equal(s[-1], alone[0]) and torch.equal(x[-1], alone[1])
