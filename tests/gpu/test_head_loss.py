"""The head's Triton backend compiled for a device, at the shapes that it is made for.

Run by hand on a machine with a CUDA device: `pytest -m gpu tests/gpu/test_head_loss.py`. Imports
the kernels alone.
"""

import pytest
import torch
from archsearch_kernels.head_loss import head_loss, hits
from archsearch_kernels.head_loss.triton import BACKWARD, FORWARD
from torch import Tensor

pytestmark = pytest.mark.gpu

V = 8_192
LOSS = 1e-5
"""Relative error of a loss: fp32 logits, and fp32 sums of thousands of terms."""
GRADIENT = 4e-3
"""Relative error of bf16 gradients. A rounding is 1.7e-3 root mean square; the probabilities are
rounded, and so is the result."""


def inputs(
    members: int, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of size 3; a third of the labels are likely ones, as in training."""
    generator = torch.Generator("cuda").manual_seed(rows + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    hidden = normal(members, rows, width)
    head = normal(members, vocab, width) * 3 / width**0.5
    labels = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    hidden[:, ::3] += 2 * head[:, labels[::3]]
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), labels


def results(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    backend: str = "triton",
) -> tuple[Tensor, ...]:
    loss = head_loss(hidden, head, labels_N=labels, weights_N=weights, backend=backend)
    share = torch.linspace(1, 2, len(loss), device="cuda").to(loss)
    return loss.detach(), *torch.autograd.grad((loss * share).sum(), (hidden, head))


def exact(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The reference in fp64, a member at a time: all logits of all members would not fit."""
    share = torch.linspace(1, 2, len(hidden), device="cuda").double()
    losses, gradients = [], []
    for m in range(len(hidden)):
        one = [x[m : m + 1].detach().double().requires_grad_() for x in (hidden, head)]
        loss = head_loss(*one, labels_N=labels, weights_N=weights, backend="reference")
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad((loss * share[m]).sum(), one))
    return torch.cat(losses), *(torch.cat(each) for each in zip(*gradients, strict=True))


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def assert_close(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    loss, *gradients = (error(a, b) for a, b in zip(found, truth, strict=True))
    assert loss < LOSS
    assert max(gradients) < GRADIENT, gradients


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("members", "rows"), [(16, 16_384), (16, 1_024), (4, 1_024), (1, 1_024)])
def test_real_shapes_agree_with_the_reference(
    members: int, rows: int, width: int, weighted: bool
) -> None:
    given = inputs(members, rows, V, width)
    weights = (torch.arange(rows, device="cuda") % 5) / rows if weighted else None
    found = results(*given, weights)
    assert_close(found, exact(*given, weights))
    for _ in range(10):
        for again, before in zip(results(*given, weights), found, strict=True):
            assert torch.equal(again, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "vocab", "width"),
    [
        (1, 5, 6),
        (1_000, 8_193, 16),
        (777, 501, 48),
        (130, 129, 20),
        (999, 8_193, 200),
        (64, 300, 256),
    ],
)
def test_odd_sizes_agree_with_the_reference(
    rows: int, vocab: int, width: int, dtype: torch.dtype
) -> None:
    given = inputs(3, rows, vocab, width, dtype)
    assert_close(results(*given), exact(*given))


def test_every_width_of_the_tables_agrees_without_padding() -> None:
    assert sorted(FORWARD) == sorted(BACKWARD) == [16, 32, 64, 128, 256]
    for width in FORWARD:
        given = inputs(2, 2_048, 4_096, width)
        assert_close(results(*given), exact(*given))


def test_fp32_products_are_fp32() -> None:
    given = inputs(2, 300, 500, 128, torch.float32)
    for found, truth in zip(results(*given), exact(*given), strict=True):
        assert error(found, truth) < 5e-6  # tf32 would be off by 3e-4


def test_members_lie_strided_in_one_buffer() -> None:
    hidden, head, labels = inputs(4, 512, V, 64)
    buffer = torch.randn(4, V * 64 + 96, device="cuda").bfloat16()
    buffer[:, 32 : 32 + V * 64] = head.detach().flatten(1)
    view = buffer[:, 32 : 32 + V * 64].view(4, V, 64).detach().requires_grad_()
    turned = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for found, wanted in zip(
        results(turned, view, labels), results(hidden, head, labels), strict=True
    ):
        assert torch.equal(found, wanted)


def test_offsets_beyond_32_bits() -> None:
    """130 x 131,072 x 128 = 2.2e9 numbers; the last member is what it is alone."""
    hidden, head, labels = inputs(130, 64, 131_072, 128)
    found = results(hidden, head, labels)
    last = [x[-1:].detach().requires_grad_() for x in (hidden, head)]
    loss, *gradients = exact(*last, labels)
    assert error(found[0][-1:], loss) < LOSS
    for gradient, truth in zip(found[1:], gradients, strict=True):
        assert error(gradient[-1:], truth * 2) < GRADIENT  # the last member's share of the sum is 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's own
@pytest.mark.parametrize(("members", "rows"), [(1, 1_024), (16, 4_096)])
def test_a_captured_call_reads_new_inputs_and_no_value_back(members: int, rows: int) -> None:
    first, second = inputs(members, rows, V, 128), inputs(members, rows, V, 128)
    with torch.no_grad():
        second[0].mul_(0.5)
        second[2].add_(1).remainder_(V)
    wanted = [*results(*second), hits(*(x.detach() for x in second), backend="triton")]
    results(*first)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            found = [*results(*first), hits(*(x.detach() for x in first), backend="triton")]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for old, new in zip(first, second, strict=True):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_a_member_that_is_not_finite_leaves_the_others_bitwise() -> None:
    hidden, head, labels = inputs(4, 1_024, V, 64)
    before = results(hidden, head, labels)
    with torch.no_grad():
        hidden[1, 5] = float("nan")
    after = results(hidden, head, labels)
    assert not after[0][1].isfinite()
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[[0, 2, 3]], new[[0, 2, 3]])


@pytest.mark.parametrize("vocab", [V, 8_193, 77])
@pytest.mark.parametrize("width", [20, 64, 128])
def test_hits_agree_with_the_reference_ties_included(vocab: int, width: int) -> None:
    """Small integers, whose products are exact in any order, and which are often equal."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, head = (
        torch.randint(-1, 2, shape, generator=generator, device="cuda").bfloat16()
        for shape in ((3, 2_000, width), (3, vocab, width))
    )
    best = (hidden[0].float() @ head[0].float().T).argmax(-1)
    labels = torch.where(torch.arange(2_000, device="cuda") % 2 > 0, best, best + 1) % vocab
    found = hits(hidden, head, labels, backend="triton")
    assert torch.equal(found, hits(hidden, head, labels, backend="reference"))
    assert 1_000 <= int(found[0]) < 1_100


def test_an_error_of_one_percent_is_seen() -> None:
    given = inputs(2, 1_024, V, 64)
    found, truth = results(*given), exact(*given)
    for index in range(3):
        wrong = [x.float() * 1.01 if i == index else x for i, x in enumerate(found)]
        with pytest.raises(AssertionError):
            assert_close(tuple(wrong), truth)
