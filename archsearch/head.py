"""The tied head of a population: cross-entropy and hits at labelled rows, never storing all logits.

Works on the stacked tensors of M members, outside vmap. The loss takes its gradient in the forward
pass, a block of rows at a time: with p = softmax(h E^T), d loss/d h = (p - onehot) E / N and
d loss/d E = (p - onehot)^T h / N, so a block's logits are dropped as soon as they are used. With a
weight for each row, the weight stands in the place of 1 / N.

Shape suffixes: M members, N labelled rows, D width, V vocabulary; C rows of one block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_LOGITS = 2**24
"""Logits held at once, over all members: 64 MiB in fp32."""


def _block_rows(embedding_MVD: Tensor) -> int:
    members, vocab, _ = embedding_MVD.shape
    return max(1, _BLOCK_LOGITS // (members * vocab))


def _wide(logits: Tensor) -> Tensor:
    """Softmax sums are taken in fp32 at least."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MND: Tensor,
        embedding_MVD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        rows = hidden_MND.shape[1]
        losses = []
        d_hidden = torch.empty_like(hidden_MND)
        d_embedding = torch.zeros_like(embedding_MVD)
        step = _block_rows(embedding_MVD)
        for start in range(0, rows, step):
            block = slice(start, start + step)
            hidden_MCD = hidden_MND[:, block]
            log_p_MCV = _wide(hidden_MCD @ embedding_MVD.transpose(1, 2)).log_softmax(-1)
            index_MC1 = labels_N[block].expand(log_p_MCV.shape[0], -1).unsqueeze(-1)
            found_MC1 = log_p_MCV.gather(-1, index_MC1)
            grad_MCV = log_p_MCV.exp_()
            grad_MCV.scatter_add_(-1, index_MC1, torch.full_like(grad_MCV[..., :1], -1.0))
            if weights_N is None:
                grad_MCV.div_(rows)
            else:
                weights_C1 = weights_N[block].to(found_MC1.dtype).unsqueeze(-1)
                found_MC1, grad_MCV = found_MC1 * weights_C1, grad_MCV.mul_(weights_C1)
            losses.append(-found_MC1.sum((1, 2)))
            grad_MCV = grad_MCV.to(hidden_MND.dtype)
            torch.bmm(grad_MCV, embedding_MVD, out=d_hidden[:, block])
            d_embedding.baddbmm_(grad_MCV.transpose(1, 2), hidden_MCD)
        ctx.save_for_backward(d_hidden, d_embedding)
        loss_M = torch.stack(losses).sum(0)
        return loss_M / rows if weights_N is None else loss_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss_M: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_embedding = ctx.saved_tensors
        d_loss_M11 = d_loss_M.view(-1, 1, 1).to(d_hidden.dtype)
        return d_hidden * d_loss_M11, d_embedding * d_loss_M11, None, None


def head_loss(
    hidden_MND: Tensor, embedding_MVD: Tensor, labels_N: Tensor, weights_N: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy of each member over its labelled rows: loss_M, fp32 or wider.

    Args:
        labels_N: int64, the same for all members.
        weights_N: what each row counts, for a weighted sum in place of the mean.
    """
    apply: Any = _HeadLoss.apply
    loss_M: Tensor = apply(hidden_MND, embedding_MVD, labels_N, weights_N)
    return loss_M


def hits(hidden_MND: Tensor, embedding_MVD: Tensor, labels_N: Tensor) -> Tensor:
    """Labelled rows where the highest logit is the label's: int64 [M]."""
    found = hidden_MND.new_zeros(hidden_MND.shape[0], dtype=torch.int64)
    step = _block_rows(embedding_MVD)
    for start in range(0, hidden_MND.shape[1], step):
        block = slice(start, start + step)
        best_MC = (hidden_MND[:, block] @ embedding_MVD.transpose(1, 2)).argmax(-1)
        found += (best_MC == labels_N[block]).sum(-1)
    return found
