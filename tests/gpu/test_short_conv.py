"""The short convolution's programs compiled for a device, at the shapes that they are made for.

Run by hand on a machine with a CUDA device: `pytest -m gpu tests/gpu/test_short_conv.py`. Imports
the kernels alone. Truths are the reference in fp64.
"""

import pytest
import torch
from archsearch_kernels.short_conv import short_conv
from torch import Tensor
from torch.func import vmap

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Relative error: of fp32, sums of up to 1e5 terms in another order; else one rounding."""
ALL = {"silu": True, "residual": True}

Named = dict[str, Tensor]


def inputs(
    B: int, T: int, C: int, J: int, dtype: torch.dtype = torch.bfloat16, tail: bool = True
) -> Named:
    generator = torch.Generator("cuda").manual_seed(T + C)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    found = {"x_BTC": normal(B, T, C), "weight_CJ": normal(C, J), "bias_C": normal(C)}
    found |= {"gate_BTC": normal(B, T, C)} | ({"tail_BPC": normal(B, J - 1, C)} if tail else {})
    return {name: x.requires_grad_() for name, x in found.items()}


def results(given: Named, backend: str = "triton", **options: bool) -> Named:
    y, tail = short_conv(**given, **options, backend=backend)
    generator = torch.Generator("cuda").manual_seed(1)
    weights = [
        torch.randn(x.shape, generator=generator, device="cuda").bfloat16().to(x) for x in (y, tail)
    ]
    gradients = torch.autograd.grad((y, tail), list(given.values()), weights)
    named = {f"d_{name}": g for name, g in zip(given, gradients, strict=True)}
    return {"y": y.detach(), "tail": tail.detach()} | named


def assert_exact(given: Named, **options: bool) -> None:
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    found, truth = results(given, **options), results(wide, "reference", **options)
    for name, exact in truth.items():
        error = float((found[name].double() - exact).norm() / exact.norm())
        assert error < TOLERANCE[found[name].dtype], (name, error)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 127, 128, 129, 133, 134, 1_000])
def test_every_length(tokens: int) -> None:
    assert_exact(inputs(3, tokens, 128, 4), **ALL)


@pytest.mark.parametrize("channels", [1, 20, 64, 100, 130, 1_024])
@pytest.mark.parametrize("taps", range(2, 9))
def test_every_size(taps: int, channels: int) -> None:
    assert_exact(inputs(2, 300, channels, taps), **ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_every_form(dtype: torch.dtype, silu: bool, residual: bool, gate: bool) -> None:
    given = inputs(2, 200, 96, 4, dtype, tail=False)
    if not gate:
        del given["gate_BTC"]
    assert_exact(given, silu=silu, residual=residual)


@pytest.mark.parametrize(("B", "T", "C"), [(8, 4_096, 1_024), (1, 100_003, 64), (8_192, 64, 128)])
def test_large_calls(B: int, T: int, C: int) -> None:
    assert_exact(inputs(B, T, C, 4, torch.float32), **ALL)


def test_members_have_taps_of_their_own() -> None:
    members = [inputs(64, 64, 128, 3) for _ in range(8)]
    stacked = {
        name: torch.stack([one[name] * (1 + m / 8) for m, one in enumerate(members)]).detach()
        for name in members[0]
    }
    together = {name: x.requires_grad_() for name, x in stacked.items()}

    def member(given: Named) -> Tensor:
        return short_conv(**given, **ALL, backend="triton")[0]

    y = vmap(member)(together)
    gradients = torch.autograd.grad(y, list(together.values()), torch.ones_like(y))
    for m in range(8):
        alone = {name: x[m].detach().requires_grad_() for name, x in stacked.items()}
        y_m = member(alone)
        wanted = torch.autograd.grad(y_m, list(alone.values()), torch.ones_like(y_m))
        for mine, theirs in zip((y, *gradients), (y_m, *wanted), strict=True):
            # Sums of taps may be cut elsewhere; one rounding to bf16.
            error = (mine[m].double() - theirs.double()).norm() / theirs.double().norm()
            assert float(error) < TOLERANCE[torch.bfloat16]


def test_calls_repeat_bit_by_bit_and_see_no_strides() -> None:
    given = inputs(4, 1_000, 256, 4)
    first = results(given, **ALL)
    for _ in range(20):
        for name, x in results(given, **ALL).items():
            assert torch.equal(x, first[name]), name
    turned = {
        n: x.detach().mT.contiguous().mT.requires_grad_() if x.ndim == 3 else x
        for n, x in given.items()
    }
    for name, x in results(turned, **ALL).items():
        assert torch.equal(x, first[name]), name


def test_offsets_beyond_32_bits() -> None:
    given = {n: x.detach() for n, x in inputs(1, 1_100_000, 2_048, 3, tail=False).items()}
    y, _ = short_conv(**given, **ALL, backend="triton")
    last = {n: x[:, -300:] if x.ndim == 3 else x for n, x in given.items()}
    wanted, _ = short_conv(**last, **ALL, backend="triton")
    assert torch.equal(y[:, -290:], wanted[:, -290:])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's own
def test_a_captured_call_reads_new_inputs_and_no_value_back() -> None:
    first, second = inputs(4, 512, 128, 4), inputs(4, 512, 128, 4)
    with torch.no_grad():
        for x in second.values():
            x.mul_(0.5)
    results(first, **ALL)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ones = torch.ones_like(first["x_BTC"])
        with torch.cuda.graph(graph):
            y, _ = short_conv(**first, **ALL, backend="triton")
            gradients = torch.autograd.grad(y, list(first.values()), ones)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for old, new in zip(first.values(), second.values(), strict=True):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    again, _ = short_conv(**second, **ALL, backend="triton")
    wanted = torch.autograd.grad(again, list(second.values()), ones)
    for a, b in zip((y, *gradients), (again, *wanted), strict=True):
        assert torch.equal(a, b)
