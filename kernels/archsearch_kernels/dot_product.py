"""torch's scaled dot-product attention, made to pass `torch.func.vmap` at full speed.

torch has no batching rule for its fused CPU kernel: under vmap it loops over the population and
warns. Its rule for the memory-efficient CUDA kernel loses the alignment of what that kernel's
backward reads. Here attention is an op of its own whose rule folds the mapped dimension into the
batch, which attention does not mix, so that torch never sees a mapped tensor.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, K key size, V value
size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dot_product_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, mask_B1TS: Tensor | None
) -> Tensor:
    """Return softmax(q k / sqrt(K)) v as y_BTHV, in the dtype of q.

    Args:
        q_BTHK, k_BSGK, v_BSGV: one dtype; H is a multiple of G.
        mask_B1TS: True where a query sees a key; its batch may be 1. None: causal, and S = T.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGV))
    return _folded_attention(q, k, v, mask_B1TS).transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def _folded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    y: Tensor = _FoldedAttention.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return y


class _FoldedAttention(torch.autograd.Function):
    """Attention whose vmap rule folds the population into the batch.

    Under vmap the rule calls torch's attention on unmapped tensors, so that ordinary autograd sees
    the fused kernel. `backward` serves calls outside vmap and computes the forward once more.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return _attention(q, k, v, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, mask = inputs
        ctx.save_for_backward(*tensors)
        ctx.mask = mask

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            y = _attention(q, k, v, ctx.mask)
        return *torch.autograd.grad(y, (q, k, v), grad_outputs), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        size: int = info.batch_size

        def fold(x: Tensor, in_dim: int | None) -> Tensor:
            stacked = x.expand(size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)
            return stacked.flatten(0, 1)

        q, k, v = (fold(x, dim) for x, dim in zip(inputs[:3], in_dims[:3], strict=True))
        mask, mask_dim = inputs[3], in_dims[3]
        if mask is not None and (mask_dim is not None or mask.shape[0] > 1):
            mask = fold(mask, mask_dim)
            mask = mask.repeat_interleave(q.shape[0] // mask.shape[0], 0)
        y = _folded_attention(q, k, v, mask)
        return y.view(size, -1, *y.shape[1:]), 0
