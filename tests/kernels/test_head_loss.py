"""The population's head: its reference against torch's cross-entropy, its blocks against one."""

import pytest
import torch
from archsearch_kernels import Sizes, family
from archsearch_kernels.head_loss import blocked, head_loss, hits, resolve_head
from torch import Tensor
from torch.nn import functional as F

M, N, D, V = 3, 50, 8, 40
TORCH_BACKENDS = ("reference", "blocked")


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_MND = torch.randn(M, N, D, generator=generator).to(dtype).requires_grad_()
    head_MVD = torch.randn(M, V, D, generator=generator).to(dtype).requires_grad_()
    return hidden_MND, head_MVD, torch.randint(0, V, (N,), generator=generator)


def plain(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """One member after the other by torch's own cross-entropy."""
    rows_MN = torch.stack(
        [
            F.cross_entropy(h @ e.T, labels, reduction="none")
            for h, e in zip(hidden, head, strict=True)
        ]
    )
    return rows_MN.mean(1) if weights is None else (rows_MN * weights).sum(1)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block_rows", [1, 7, 50, 1000])
def test_loss_and_gradients_are_those_of_cross_entropy(
    backend: str, weighted: bool, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "_BLOCK_LOGITS", block_rows * M * V)
    hidden, head, labels = inputs(torch.float64)
    weights = torch.linspace(0, 2, N, dtype=torch.float64) if weighted else None
    share_M = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    wanted_M = plain(hidden, head, labels, weights)
    wanted = torch.autograd.grad((wanted_M * share_M).sum(), (hidden, head))
    loss_M = head_loss(hidden, head, labels_N=labels, weights_N=weights, backend=backend)
    found = torch.autograd.grad((loss_M * share_M).sum(), (hidden, head))
    torch.testing.assert_close(loss_M, wanted_M)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_at_the_end_alone(backend: str, dtype: torch.dtype) -> None:
    hidden, head, labels = inputs(dtype)
    loss_M = head_loss(hidden, head, labels_N=labels, backend=backend)
    found = torch.autograd.grad(loss_M.sum(), (hidden, head))
    wide = [x.detach().double().requires_grad_() for x in (hidden, head)]
    wanted_M = plain(*wide, labels, None)
    assert loss_M.dtype is torch.float32
    torch.testing.assert_close(loss_M.double(), wanted_M, rtol=1e-6, atol=0)
    for gradient, wanted in zip(found, torch.autograd.grad(wanted_M.sum(), wide), strict=True):
        rounding = torch.finfo(dtype).eps / 2
        atol = float(wanted.abs().max()) * 1e-6 + torch.finfo(dtype).smallest_normal * rounding
        torch.testing.assert_close(gradient.double(), wanted, rtol=rounding * 1.01, atol=atol)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_one_member_that_is_not_finite_leaves_the_others_bitwise(backend: str) -> None:
    hidden, head, labels = inputs(torch.float32)
    before = head_loss(hidden, head, labels_N=labels, backend=backend)
    broken = hidden.detach().clone()
    broken[1] = float("nan")
    after = head_loss(broken, head, labels_N=labels, backend=backend)
    assert not after[1].isfinite()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("block_rows", [7, 1000])
def test_hits_counts_rows_whose_highest_logit_is_the_label(
    backend: str, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "_BLOCK_LOGITS", block_rows * M * V)
    hidden, head, _ = inputs(torch.float64)
    best_MN = (hidden @ head.mT).argmax(-1)
    labels = best_MN[0].clone()
    labels[:10] = (labels[:10] + 1) % V
    wanted = [(best_MN[m] == labels).sum().item() for m in range(M)]
    assert hits(hidden, head, labels, backend=backend).tolist() == wanted
    assert wanted[0] == N - 10


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_of_equal_logits_the_first_is_the_highest(backend: str) -> None:
    head = torch.zeros(1, V, D)
    head[0, [3, 5, 9]] = 1.0
    hidden = torch.ones(1, 4, D)
    labels = torch.tensor([3, 5, 9, 0])
    assert hits(hidden, head, labels, backend=backend).tolist() == [1]


def test_auto_stores_no_logits_at_any_width() -> None:
    assert resolve_head("cuda", torch.bfloat16, 128) == "triton"
    assert resolve_head("cuda", torch.bfloat16, 257) == "blocked"
    for dtype in (torch.float32, torch.float64):
        assert resolve_head("cuda", dtype, 128) == "blocked"
    assert resolve_head("cpu", torch.bfloat16, 128) == "blocked"


def test_inputs_of_a_check_have_gradients_in_which_an_error_stands_out() -> None:
    """A check measures errors against no less than 1 (`kernel_check.SMALLEST_SCALE`)."""
    one = family("head_loss")
    call = one.make_inputs(Sizes(batch=2, tokens=33, heads=2, head_size=16, state=True))
    given = [x.requires_grad_() for x in call.tensors.values()]
    loss_M = one.op(*given, **call.options, backend="reference")
    for gradient in torch.autograd.grad(loss_M.sum(), given):
        assert gradient.square().mean().sqrt() > 1
