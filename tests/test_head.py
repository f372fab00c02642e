"""The population's head against plain cross-entropy, and its block-wise form against one block."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from archsearch import head
from archsearch.head import head_loss, hits

M, N, D, V = 3, 50, 8, 40


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_MND = torch.randn(M, N, D, generator=generator).to(dtype).requires_grad_()
    embedding_MVD = torch.randn(M, V, D, generator=generator).to(dtype).requires_grad_()
    return hidden_MND, embedding_MVD, torch.randint(0, V, (N,), generator=generator)


@pytest.mark.parametrize("block_rows", [1, 7, 50, 1000])
def test_loss_and_gradients_are_those_of_cross_entropy(
    block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_BLOCK_LOGITS", block_rows * M * V)
    hidden, embedding, labels = inputs(torch.float64)
    share_M = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    loss_M = head_loss(hidden, embedding, labels)
    found = torch.autograd.grad((loss_M * share_M).sum(), (hidden, embedding))
    plain_M = torch.stack(
        [F.cross_entropy(h @ e.T, labels) for h, e in zip(hidden, embedding, strict=True)]
    )
    wanted = torch.autograd.grad((plain_M * share_M).sum(), (hidden, embedding))
    torch.testing.assert_close(loss_M, plain_M)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("block_rows", [7, 1000])
def test_weighted_rows_are_summed_by_their_weights(
    block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_BLOCK_LOGITS", block_rows * M * V)
    hidden, embedding, labels = inputs(torch.float64)
    weights_N = torch.linspace(0, 2, N, dtype=torch.float64)
    loss_M = head_loss(hidden, embedding, labels, weights_N)
    found = torch.autograd.grad(loss_M.sum(), (hidden, embedding))
    rows_MN = torch.stack(
        [
            F.cross_entropy(h @ e.T, labels, reduction="none")
            for h, e in zip(hidden, embedding, strict=True)
        ]
    )
    plain_M = (rows_MN * weights_N).sum(1)
    wanted = torch.autograd.grad(plain_M.sum(), (hidden, embedding))
    torch.testing.assert_close(loss_M, plain_M)
    torch.testing.assert_close(found, wanted)


def test_half_precision_sums_in_single_precision() -> None:
    hidden, embedding, labels = inputs(torch.bfloat16)
    loss_M = head_loss(hidden, embedding, labels)
    wide_M = head_loss(hidden.detach().float(), embedding.detach().float(), labels)
    assert loss_M.dtype is torch.float32
    # The logits are rounded to bf16 (relative error 2^-9, here of values up to about 10); the mean
    # over 50 rows averages that out.
    torch.testing.assert_close(loss_M, wide_M, rtol=0, atol=2e-2)


def test_one_member_that_is_not_finite_leaves_the_others_bitwise() -> None:
    hidden, embedding, labels = inputs(torch.float32)
    before = head_loss(hidden, embedding, labels)
    broken = hidden.detach().clone()
    broken[1] = float("nan")
    after = head_loss(broken, embedding, labels)
    assert not after[1].isfinite()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("block_rows", [7, 1000])
def test_hits_counts_rows_whose_highest_logit_is_the_label(
    block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_BLOCK_LOGITS", block_rows * M * V)
    hidden, embedding, _ = inputs(torch.float64)
    best_MN = (hidden @ embedding.transpose(1, 2)).argmax(-1)
    labels = best_MN[0].clone()
    labels[:10] = (labels[:10] + 1) % V
    wanted = [(best_MN[m] == labels).sum().item() for m in range(M)]
    assert hits(hidden, embedding, labels).tolist() == wanted
    assert wanted[0] == N - 10
