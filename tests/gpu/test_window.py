"""The Triton programs of sliding-window attention compiled for a device, at their real shapes.

Run by hand on a machine with a CUDA device: `pytest -m gpu tests/gpu/test_window.py`. Imports the
kernels alone. The truth is the definition in fp64.
"""

import pytest
import torch
from archsearch_kernels.sliding_window import sliding_window
from torch import Tensor
from torch.func import vmap

pytestmark = pytest.mark.gpu

HALF = {torch.bfloat16: 5e-3, torch.float16: 7e-4}
"""Relative error of half precision: in gradients four roundings (y, weights, their gradients, the
result) of 1.7e-3 (fp16: 2.1e-4) root mean square at most."""
SINGLE = 1e-5
"""tf32 would be off by 3e-4."""


def inputs(
    B: int,
    T: int,
    H: int,
    K: int,
    *,
    G: int | None = None,
    S: int | None = None,
    V: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of y."""
    generator = torch.Generator("cuda").manual_seed(T + K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    G, S, V = G or H, S or T, V or K
    leaves = (normal(B, T, H, K), normal(B, S, G, K), normal(B, S, G, V))
    return *(x.requires_grad_() for x in leaves), normal(B, T, H, V)


def results(
    given: tuple[Tensor, ...],
    window: int,
    exists: Tensor | None = None,
    backend: str = "triton",
) -> tuple[Tensor, ...]:
    q, k, v, dy = given
    y = sliding_window(q, k, v, window=window, exists_BS=exists, backend=backend)
    return y.detach(), *torch.autograd.grad(y, (q, k, v), dy)


def exact(
    given: tuple[Tensor, ...], window: int, exists: Tensor | None = None
) -> tuple[Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in given[:3]]
    return results((*leaves, given[3].double()), window, exists, "reference")


def assert_close(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    """Relative errors; to 0.1 where the truth is smaller (a gradient that cancels)."""
    allowed = HALF.get(found[0].dtype, SINGLE)
    for name, one, wanted in zip(("y", "dq", "dk", "dv"), found, truth, strict=True):
        size = max(0.1, float(wanted.square().mean().sqrt()))
        error = float((one.double() - wanted).square().mean().sqrt()) / size
        assert error < allowed, (name, error)


LENGTHS = (*range(1, 20), *range(30, 36), 47, 48, 49, *range(61, 68), 80, 95, 96, 97, 111, 112,
           *range(126, 131))  # fmt: skip


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length(tokens: int) -> None:
    for window in (1, 7, 64, 100):
        given = inputs(2, tokens, 2, 64)
        assert_close(results(given, window), exact(given, window))


@pytest.mark.parametrize(
    "window",
    [
        1,
        2,
        16,
        63,
        64,
        65,
        127,
        128,
        129,
        191,
        192,
        255,
        256,
        257,
        320,
        383,
        500,
        512,
        1_000,
        4_096,
    ],
)
@pytest.mark.parametrize("tokens", [300, 1_000])
def test_every_window(tokens: int, window: int) -> None:
    given = inputs(2, tokens, 4, 64, G=2)
    assert_close(results(given, window), exact(given, window))


@pytest.mark.parametrize("window", [64, 512])
@pytest.mark.parametrize("K", [16, 20, 32, 48, 64, 80, 96, 128, 200, 256])
def test_every_head_size(K: int, window: int) -> None:
    given = inputs(2, 600, 2, K)
    assert_close(results(given, window), exact(given, window))


@pytest.mark.parametrize("window", [5, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype, window: int) -> None:
    for K, V in ((64, 64), (20, 40), (128, 128)):
        given = inputs(2, 333, 4, K, V=V, G=1, dtype=dtype)
        assert_close(results(given, window), exact(given, window))


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("window", [64, 512, 2_048])
def test_a_long_sequence(window: int, group: int) -> None:
    """The last key-value head is compared, whose query heads are the last."""
    q, k, v, dy = inputs(2, 4_097, 8, 64, G=8 // group)
    found = results((q, k, v, dy), window)
    last = [x[-1:, :, -group:].detach() for x in (q, dy)], [x[-1:, :, -1:].detach() for x in (k, v)]
    truth = exact((last[0][0], *last[1], last[0][1]), window)
    counts = (group, group, 1, 1)
    assert_close(tuple(x[-1:, :, -n:] for x, n in zip(found, counts, strict=True)), truth)


@pytest.mark.parametrize("queries", [1, 5, 16, 17, 100, 200])
@pytest.mark.parametrize("window", [64, 256, 300])
def test_older_keys_some_of_which_do_not_exist(window: int, queries: int) -> None:
    given = inputs(3, queries, 4, 64, G=2, S=queries + window)
    place = torch.arange(queries + window, device="cuda")
    empty = torch.tensor([0, 17, window], device="cuda")
    exists = place >= empty[:, None]
    assert_close(results(given, window, exists), exact(given, window, exists))
    assert_close(results(given, window), exact(given, window))


def test_holes_and_queries_that_see_nothing() -> None:
    given = inputs(2, 300, 2, 64)
    exists = torch.rand(2, 300, device="cuda", generator=torch.Generator("cuda")) > 0.5
    seen = exists | (torch.arange(300, device="cuda") % 7 == 0)
    assert_close(results(given, 90, seen), exact(given, 90, seen))
    for found in results(given, 90, torch.zeros_like(exists)):
        assert not found.any()


@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_a_population_of_short_sequences(tokens: int) -> None:
    q, k, v, dy = inputs(64, tokens, 2, 64)
    found = results((q, k, v, dy), 64)
    assert_close(found, exact((q, k, v, dy), 64))
    stacked = [x.detach().unflatten(0, (16, 4)).requires_grad_() for x in (q, k, v)]
    y = vmap(lambda *x: sliding_window(*x, window=64, backend="triton"))(*stacked)
    mapped = (y, *torch.autograd.grad(y, stacked, dy.unflatten(0, (16, 4))))
    for one, other in zip(mapped, found, strict=True):
        assert torch.equal(one.flatten(0, 1), other)


@pytest.mark.parametrize("window", [64, 512, 2_048])
def test_calls_repeat_bit_by_bit_and_see_no_strides(window: int) -> None:
    q, k, v, dy = inputs(2, 3_000, 8, 64, G=4)
    first = results((q, k, v, dy), window)
    for _ in range(20):
        for found, wanted in zip(results((q, k, v, dy), window), first, strict=True):
            assert torch.equal(found, wanted)
    whole = torch.cat([x.detach() for x in (q, k, v)], 2)  # as one projection gives them
    parts = [x.requires_grad_() for x in whole.split((8, 4, 4), 2)]
    turned = dy.transpose(1, 3).contiguous().transpose(1, 3)
    for found, wanted in zip(results((*parts, turned), window), first, strict=True):
        assert torch.equal(found, wanted)


def test_many_heads_and_offsets_beyond_32_bits() -> None:
    """70,000 sequences, more than a grid's second dimension; and 2.3e9 numbers."""
    for B, T, H in ((70_000, 3, 1), (17, 131_072, 16)):
        given = [x.detach()[:1, :, :1].expand(B, T, H, -1) for x in inputs(1, T, 1, 64)[:3]]
        q, k, v = (x.contiguous() for x in given)
        y = sliding_window(q, k, v, window=64, backend="triton")
        assert torch.equal(y[-1, :, -1], y[0, :, 0])
        del y, q, k, v, given
        torch.cuda.empty_cache()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's own
@pytest.mark.parametrize(("batch", "tokens", "window"), [(64, 128, 64), (1, 4_096, 512)])
def test_a_captured_call_reads_new_inputs_and_no_value_back(
    batch: int, tokens: int, window: int
) -> None:
    first, second = inputs(batch, tokens, 2, 64), inputs(batch, tokens, 2, 64)
    exists = torch.ones(batch, tokens, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        for x in second:
            x.mul_(0.5)
    wanted = results(second, window, exists)
    results(first, window, exists)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            found = results(first, window, exists)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for old, new in zip(first, second, strict=True):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_a_sequence_that_is_not_finite_leaves_the_others_bitwise() -> None:
    given = inputs(4, 500, 2, 64)
    before = results(given, 64)
    with torch.no_grad():
        given[0][1, 5] = float("nan")
    after = results(given, 64)
    assert not after[0][1].isfinite().all()
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[[0, 2, 3]], new[[0, 2, 3]])


def test_an_error_of_one_percent_is_seen() -> None:
    given = inputs(2, 500, 2, 64)
    found, truth = results(given, 64), exact(given, 64)
    for index in range(4):
        wrong = [x.float() * 1.01 if i == index else x.float() for i, x in enumerate(found)]
        with pytest.raises(AssertionError):
            assert_close(tuple(x.bfloat16() for x in wrong), truth)
