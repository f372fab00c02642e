"""The Taylor programs compiled for a device, at the shapes that they are made for.

Run by hand on a machine with a CUDA device: `pytest -m gpu -n 8 tests/gpu/test_taylor.py`, where
most of the time is the compiler's. Imports the kernels alone. Truths are quadratic, in fp64.
"""

import pytest
import torch
from archsearch_kernels.linear_attention.taylor import features
from archsearch_kernels.taylor_linear_attention import (
    prefix_state,
    step,
    taylor_linear_attention,
)
from torch import Tensor

pytestmark = pytest.mark.gpu

BF16 = 5e-3
"""Relative error of bf16 results: factors are rounded twice, and the result; 2e-3 each at most."""
STATE = 4e-3
"""Relative error of a state in fp32, of products of one rounding."""
SINGLE = 1e-5

Named = dict[str, Tensor]


def inputs(
    B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype = torch.bfloat16, state: bool = False
) -> Named:
    generator = torch.Generator("cuda").manual_seed(T + K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    found = {
        "q_BTHK": normal(B, T, H, K),
        "k_BTHK": normal(B, T, H, K),
        "v_BTHV": normal(B, T, H, V),
    }
    found = {name: x.to(dtype) for name, x in found.items()}
    if state:
        past, values = features(normal(B, 5, H, K)), normal(B, 5, H, V)
        found["memory_BHFV"] = torch.einsum("bphf,bphv->bhfv", past, values)
        found["normaliser_BHF"] = past.sum(1)
    return {name: x.requires_grad_() for name, x in found.items()}


def weights(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [
        torch.randn(y.shape, generator=generator, device="cuda").bfloat16().to(y) for y in outputs
    ]


def results(
    given: Named, keeps: bool = True, exists: Tensor | None = None, at: Tensor | None = None
) -> Named:
    found = taylor_linear_attention(
        **given, exists_BT=exists, keep_state=keeps, at_BS=at, backend="triton"
    )
    return named(given, [y for y in found if y is not None])


def named(given: Named, outputs: list[Tensor]) -> Named:
    gradients = torch.autograd.grad(outputs, list(given.values()), weights(outputs))
    names = ["y", "memory", "normaliser"][: len(outputs)]
    return dict(zip(names, (y.detach() for y in outputs), strict=True)) | {
        f"d_{name}": g for name, g in zip(given, gradients, strict=True)
    }


def exact(
    given: Named, keeps: bool = True, exists: Tensor | None = None, at: Tensor | None = None
) -> Named:
    """In fp64, through all pairs, one sequence and head after the other would be the same."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    q, k, v = (leaves[name].transpose(1, 2) for name in ("q_BTHK", "k_BTHK", "v_BTHV"))
    t = q @ k.mT / q.shape[-1] ** 0.5
    place = torch.arange(k.shape[2], device="cuda")
    last = place if at is None else at[:, None]
    w, seen = (1 + t + t * t / 2) * (place <= last[..., None]), features(k)
    if exists is not None:
        w, seen = w * exists[:, None, None, :], seen * exists[:, None, :, None]
    y, total, memory, normaliser = w @ v, w.sum(-1), seen.mT @ v, seen.sum(-2)
    if "memory_BHFV" in leaves:
        query = features(q)
        y = y + query @ leaves["memory_BHFV"]
        total = total + (query @ leaves["normaliser_BHF"][..., None]).squeeze(-1)
        memory, normaliser = memory + leaves["memory_BHFV"], normaliser + leaves["normaliser_BHF"]
    y = (y / (total + 1e-6)[..., None]).transpose(1, 2)
    return named(leaves, [y, memory, normaliser][: 3 if keeps else 1])


def assert_close(found: Named, truth: Named, dtype: torch.dtype = torch.bfloat16) -> None:
    """Relative errors; absolute ones where the truth is below size 1 (a gradient that cancels)."""
    assert found.keys() == truth.keys()
    for name, wanted in truth.items():
        x = wanted.detach()
        size = max(1.0, float(x.square().mean().sqrt()))
        error = float((found[name].double() - x).square().mean().sqrt()) / size
        half = BF16 if found[name].dtype != torch.float32 else STATE
        assert error < (SINGLE if dtype == torch.float32 else half), (name, error)


def test_the_first_chunk_through_keys_of_zero_is_the_mean() -> None:
    """Features of queries meet a state of nothing: a product that reads the wrong place is seen."""
    given = inputs(2, 64, 3, 16, 64)
    with torch.no_grad():
        given["k_BTHK"].zero_()
        mean = given["v_BTHV"].double().cumsum(1) / torch.arange(1, 65, device="cuda").view(
            -1, 1, 1
        )
        found = taylor_linear_attention(**given, backend="triton")[0]
    torch.testing.assert_close(found.double(), mean, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [*range(1, 18), 63, 64, 65, 127, 128, 129, 130, 1_000])
def test_every_length(tokens: int, state: bool) -> None:
    given = inputs(2, tokens, 2, 16, 64, state=state)
    assert_close(results(given), exact(given))


@pytest.mark.parametrize("V", [16, 37, 48, 64, 80, 128])
@pytest.mark.parametrize("K", [4, 8, 12, 16, 24, 32])
def test_every_size(K: int, V: int) -> None:
    given = inputs(2, 200, 2, K, V, state=True)
    assert_close(results(given), exact(given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("K", [8, 16])  # programs for fp32 compile slowly for more
def test_other_dtypes(K: int, dtype: torch.dtype) -> None:
    given = inputs(2, 150, 2, K, 20, dtype, state=True)
    assert_close(results(given), exact(given), dtype)


@pytest.mark.parametrize("tokens", [*range(1, 18), 63, 64, 65, 127, 130, 256, 512])
def test_short_sequences(tokens: int) -> None:
    given = inputs(2, tokens, 2, 16, 128)
    assert_close(results(given, keeps=False), exact(given, keeps=False))


@pytest.mark.parametrize("V", [16, 37, 64, 80, 128])
@pytest.mark.parametrize("K", [4, 8, 12, 16, 24, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_sequences_of_every_size(K: int, V: int, dtype: torch.dtype) -> None:
    given = inputs(3, 200, 2, K, V, dtype)
    exists = torch.rand(3, 200, device="cuda") > 0.3
    exists[:, 0] = True  # a query that reads nothing has a denominator of 1e-6
    found = results(given, keeps=False, exists=exists)
    assert_close(found, exact(given, keeps=False, exists=exists), dtype)
    for name, x in results(given, keeps=False, exists=exists).items():
        assert torch.equal(x, found[name]), name


@pytest.mark.parametrize("queries", [1, 4, 16, 32, 64, 100])
def test_queries_at_places_of_their_own(queries: int) -> None:
    given = inputs(3, 256, 2, 16, 128)
    given["q_BTHK"] = inputs(3, queries, 2, 16, 128)["q_BTHK"]
    at = torch.randint(0, 256, (3, queries), device="cuda")
    assert_close(results(given, keeps=False, at=at), exact(given, keeps=False, at=at))


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (4, 16), (20, 16)])
def test_long_sequences_with_and_without_parts(batch: int, heads: int) -> None:
    """(1, 1) is cut into many parts, (20, 16) into none. The last sequence and head is compared."""
    given = inputs(batch, 4_097, heads, 16, 64)
    found = results(given, keeps=False)
    last = {n: x[-1:, :, -1:].detach().requires_grad_() for n, x in given.items()}
    y = taylor_linear_attention(**last, keep_state=False, backend="triton")[0]
    # The gradient of y at the last head, as `weights` drew it for all.
    dy = weights([found["y"]])[0][-1:, :, -1:]
    leaves = {n: x.detach().double().requires_grad_() for n, x in last.items()}
    q, k, v = (x.transpose(1, 2) for x in leaves.values())
    t = q @ k.mT / 4
    w = (1 + t + t * t / 2).tril()
    truth = (w @ v / (w.sum(-1, keepdim=True) + 1e-6)).transpose(1, 2)
    gradients = torch.autograd.grad(truth, list(leaves.values()), dy.double())
    wanted = {"y": truth.detach()} | {f"d_{n}": g for n, g in zip(given, gradients, strict=True)}
    assert_close({name: x[-1:, :, -1:] for name, x in found.items()}, wanted)
    assert_close({"y": y.detach()}, {"y": wanted["y"]})


def test_the_denominator_of_32768_tokens_is_exact() -> None:
    given = {n: x.detach() for n, x in inputs(1, 32_768, 2, 16, 64).items()}
    ones = torch.ones_like(given["v_BTHV"])  # what is read of ones is what the denominator is
    y, _, normaliser = taylor_linear_attention(
        given["q_BTHK"], given["k_BTHK"], ones, backend="triton"
    )
    assert normaliser is not None
    truth = features(given["k_BTHK"].double()).sum(1)
    assert float((normaliser - truth).norm() / truth.norm()) < 1e-5
    torch.testing.assert_close(y.float(), ones.float(), atol=0.01, rtol=0)


def test_prefix_with_lengths_and_padding() -> None:
    given = inputs(3, 700, 4, 16, 64)
    k, v = given["k_BTHK"], given["v_BTHV"]
    length = torch.tensor([700, 0, 333], device="cuda")
    exists = torch.rand(3, 700, device="cuda") > 0.3
    found = list(prefix_state(k, v, exists_BT=exists, length_B=length, backend="triton"))
    gradients = torch.autograd.grad(found, (k, v), weights(found))
    leaves = [x.detach().double().requires_grad_() for x in (k, v)]
    seen = exists & (torch.arange(700, device="cuda") < length[:, None])
    phi = features(leaves[0]) * seen[..., None, None]
    truth = [torch.einsum("bthf,bthv->bhfv", phi, leaves[1]), phi.sum(1)]
    wanted = torch.autograd.grad(truth, leaves, [x.double() for x in weights(found)])
    names = ("memory", "normaliser", "dk", "dv")
    mine = (*(x.detach() for x in found), *gradients)
    assert_close(
        dict(zip(names, mine, strict=True)), dict(zip(names, (*truth, *wanted), strict=True))
    )


def test_steps_go_on_from_a_pass() -> None:
    given = {n: x.detach() for n, x in inputs(3, 300, 4, 16, 64).items()}
    truth = exact({n: x.requires_grad_() for n, x in given.items()}, keeps=False)["y"]
    first = {n: x[:, :200].detach() for n, x in given.items()}
    _, memory, normaliser = taylor_linear_attention(**first, backend="triton")
    assert memory is not None and normaliser is not None
    q, k, v = (x.detach() for x in given.values())
    for t in range(200, 300):
        y = step(q[:, t], k[:, t], v[:, t], memory, normaliser, backend="triton")
        error = float((y.double() - truth[:, t]).norm() / truth[:, t].norm())
        assert error < BF16


def test_calls_repeat_bit_by_bit_and_see_no_strides() -> None:
    given = inputs(2, 1_000, 4, 16, 64, state=True)
    first = results(given)
    for _ in range(20):
        for name, x in results(given).items():
            assert torch.equal(x, first[name]), name
    turned = {
        n: x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        if x.shape[1] == 1_000
        else x
        for n, x in given.items()
    }
    for name, x in results(turned).items():
        assert torch.equal(x, first[name]), name
    odd = {
        n: torch.nn.functional.pad(x.detach(), (0, 3))[..., :-3].requires_grad_()
        for n, x in given.items()
    }
    for name, x in results(odd).items():
        assert torch.equal(x, first[name]), name


def test_many_heads_and_offsets_beyond_32_bits() -> None:
    """70,000 sequences, more than a grid's second dimension; and 2.3e9 numbers."""
    for B, T, H in ((70_000, 3, 1), (17, 131_072, 16)):
        given = {n: x.detach()[:1].expand(B, T, H, -1) for n, x in inputs(1, T, H, 16, 64).items()}
        given = {n: x.contiguous() for n, x in given.items()}
        y, *_ = taylor_linear_attention(**given, keep_state=False, backend="triton")
        assert torch.equal(y[-1], y[0])
        del y, given
        torch.cuda.empty_cache()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's own
@pytest.mark.parametrize(("batch", "tokens"), [(16, 512), (1, 4_096)])
def test_a_captured_call_reads_new_inputs_and_no_value_back(batch: int, tokens: int) -> None:
    first, second = (inputs(batch, tokens, 2, 16, 64) for _ in range(2))
    with torch.no_grad():
        for x in second.values():
            x.mul_(0.5)
    wanted = results(second)
    results(first)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = [torch.ones_like(x) for x in (wanted["y"], wanted["memory"], wanted["normaliser"])]
        with torch.cuda.graph(graph):
            outputs = list(taylor_linear_attention(**first, backend="triton"))
            gradients = torch.autograd.grad(outputs, list(first.values()), drawn)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for old, new in zip(first.values(), second.values(), strict=True):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    again = list(taylor_linear_attention(**second, backend="triton"))
    for a, b in zip((*outputs, *gradients),
                    (*again, *torch.autograd.grad(again, list(second.values()), drawn)),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)
