"""The head's cross-entropy a block of rows at a time, in plain torch.

The gradients are taken in the forward pass, so that a block's logits are dropped as soon as they
are used. Logits and sums are fp32 at least.

Shape suffixes: M members, N labelled rows, D width, V vocabulary; C rows of one block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archsearch_kernels.precision import accumulator

_BLOCK_LOGITS = 2**24
"""Logits held at once, over all members: 64 MiB in fp32."""


def head_loss(
    hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor, weights_N: Tensor | None
) -> Tensor:
    """See `archsearch_kernels.head_loss.head_loss`."""
    apply: Any = _HeadLoss.apply
    loss_M: Tensor = apply(hidden_MND, head_MVD, labels_N, weights_N)
    return loss_M


def hits(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor) -> Tensor:
    """See `archsearch_kernels.head_loss.hits`."""
    found_M = labels_N.new_zeros(hidden_MND.shape[0])
    for block in _blocks(hidden_MND, head_MVD):
        best_MC = _product(hidden_MND[:, block], head_MVD.mT).argmax(-1)
        found_M += (best_MC == labels_N[block]).sum(-1)
    return found_M


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MND: Tensor,
        head_MVD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        rows, compute = hidden_MND.shape[1], accumulator(hidden_MND.dtype)
        loss_M = hidden_MND.new_zeros(hidden_MND.shape[0], dtype=compute)
        d_hidden_MND = torch.empty_like(hidden_MND)
        d_head_MVD = torch.zeros_like(head_MVD, dtype=compute)
        for block in _blocks(hidden_MND, head_MVD):
            hidden_MCD = hidden_MND[:, block]
            log_p_MCV = _product(hidden_MCD, head_MVD.mT).log_softmax(-1)
            index_MC1 = labels_N[block].expand(log_p_MCV.shape[0], -1).unsqueeze(-1)
            label_MC1 = log_p_MCV.gather(-1, index_MC1)
            d_MCV = log_p_MCV.exp_()
            d_MCV.scatter_add_(-1, index_MC1, torch.full_like(d_MCV[..., :1], -1.0))
            if weights_N is None:
                label_MC1, d_MCV = label_MC1 / rows, d_MCV.div_(rows)
            else:
                weights_C1 = weights_N[block].to(compute).unsqueeze(-1)
                label_MC1, d_MCV = label_MC1 * weights_C1, d_MCV.mul_(weights_C1)
            loss_M -= label_MC1.sum((1, 2))
            d_hidden_MND[:, block] = _product(d_MCV, head_MVD)
            if hidden_MCD.dtype == compute:
                d_head_MVD.baddbmm_(d_MCV.mT, hidden_MCD)
            else:
                d_head_MVD += _product(d_MCV.mT, hidden_MCD)
        ctx.save_for_backward(d_hidden_MND, d_head_MVD.to(head_MVD.dtype))
        return loss_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss_M: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden_MND, d_head_MVD = ctx.saved_tensors
        d_loss_M11 = d_loss_M.view(-1, 1, 1)
        d_hidden_MND, d_head_MVD = (
            (gradient * d_loss_M11).to(gradient.dtype) for gradient in (d_hidden_MND, d_head_MVD)
        )
        return d_hidden_MND, d_head_MVD, None, None


def _blocks(hidden_MND: Tensor, head_MVD: Tensor) -> list[slice]:
    members, rows, _ = hidden_MND.shape
    step = max(1, _BLOCK_LOGITS // (members * head_MVD.shape[1]))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _product(a_MXY: Tensor, b_MYZ: Tensor) -> Tensor:
    """Matrix product in fp32 at least; on CUDA of matrices as narrow as they come."""
    narrow = b_MYZ.dtype
    if narrow.itemsize < 4 and a_MXY.is_cuda:
        return torch.bmm(a_MXY.to(narrow), b_MYZ, out_dtype=torch.float32)
    compute = accumulator(narrow)
    return a_MXY.to(compute) @ b_MYZ.to(compute)
