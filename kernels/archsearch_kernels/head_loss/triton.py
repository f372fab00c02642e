"""The head's cross-entropy and hits by the Triton programs of this folder, on CUDA.

Each pass is a custom op with a fake rule, so that it can be traced and compiled around. Block sizes
come from a table; nothing is timed, nothing read back, and no atomics are used, so a call can be
captured in a CUDA graph and repeats bit by bit. Where members and blocks give too few
programs for a card, a pass is split: the forward pass over the vocabulary, the backward pass over
the rows; the parts go to buffers that are added up in order. Products of fp32 inputs are exact
fp32, which no matrix unit does: correct, not fast.

Shape suffixes: M members, N labelled rows, D width, V vocabulary; S splits, B blocks of rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.autograd.function import once_differentiable

from archsearch_kernels.head_loss import WIDEST_TRITON, triton_programs

_PROCESSORS = 132
"""Multiprocessors that a split fills: those of an H100 or H200. Not read from the device, so that
sums have the same order on every card."""

_COMBINED_ROWS = 16
"""Rows of a program that adds up the parts of a split forward pass."""


@dataclass(frozen=True)
class Blocks:
    """Rows and columns of the blocks of a program, and how it is compiled.

    `resident` programs fit a multiprocessor by their registers.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    resident: int


FORWARD = {
    16: Blocks(64, 128, 4, 3, resident=3),
    32: Blocks(64, 64, 4, 3, resident=5),
    64: Blocks(64, 64, 4, 3, resident=3),
    128: Blocks(64, 128, 4, 3, resident=2),
    256: Blocks(64, 64, 4, 2, resident=2),
}
"""By padded width, for half precision: the fastest of several each on an H200. Hits use it too."""

BACKWARD = {
    16: Blocks(64, 64, 4, 3, resident=5),
    32: Blocks(64, 128, 4, 3, resident=2),
    64: Blocks(128, 64, 4, 3, resident=2),
    128: Blocks(64, 64, 4, 3, resident=2),
    256: Blocks(32, 64, 4, 3, resident=2),
}

_SINGLE = Blocks(16, 16, 4, 1, resident=4)
"""For fp32, at every width."""


def head_loss(
    hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor, weights_N: Tensor | None
) -> Tensor:
    """See `archsearch_kernels.head_loss.head_loss`.

    Raises:
        ValueError: a dtype or a width that there are no programs for.
    """
    apply: Any = _HeadLoss.apply
    loss_M: Tensor = apply(hidden_MND, head_MVD, labels_N, weights_N)
    return loss_M


def hits(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor) -> Tensor:
    """See `archsearch_kernels.head_loss.hits`.

    Raises:
        ValueError: a dtype or a width that there are no programs for.
    """
    found_MB: Tensor = _hits(hidden_MND, head_MVD, labels_N)
    return found_MB.sum(1)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MND: Tensor,
        head_MVD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        loss_MN: Tensor
        loss_MN, log_total_MN, d_hidden_MND = _forward(hidden_MND, head_MVD, labels_N, weights_N)
        ctx.save_for_backward(hidden_MND, head_MVD, labels_N, weights_N, log_total_MN, d_hidden_MND)
        return loss_MN.sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss_M: Tensor) -> tuple[Tensor, Tensor, None, None]:
        *inputs, log_total_MN, d_hidden_MND = ctx.saved_tensors
        d_head_MVD = _backward(*inputs, log_total_MN, d_loss_M)
        scaled_MND = (d_hidden_MND * d_loss_M.view(-1, 1, 1)).to(d_hidden_MND.dtype)
        return scaled_MND, d_head_MVD, None, None


@torch.library.custom_op("archsearch::head_hits", mutates_args=())
def _hits(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor) -> Tensor:
    """Hits of each member and block of rows."""
    M, N, D = hidden_MND.shape
    V, P = head_MVD.shape[1], _padded(hidden_MND)
    hidden_MND, head_MVD = _dense(hidden_MND), _dense(head_MVD)
    blocks = _blocks(FORWARD, hidden_MND, P)
    found_MB = labels_N.new_empty(M, triton.cdiv(N, blocks.rows))
    with torch.cuda.device_of(hidden_MND):
        triton_programs.hits[(found_MB.shape[1], M)](
            hidden_MND,
            head_MVD,
            labels_N.contiguous(),
            found_MB,
            N,
            V,
            *hidden_MND.stride()[:2],
            *head_MVD.stride()[:2],
            D=D,
            P=P,
            R=blocks.rows,
            C=blocks.columns,
            CHECK=V % blocks.columns != 0,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return found_MB


@_hits.register_fake
def _(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor) -> Tensor:
    rows = _blocks(FORWARD, hidden_MND, _padded(hidden_MND)).rows
    return labels_N.new_empty(hidden_MND.shape[0], triton.cdiv(hidden_MND.shape[1], rows))


@torch.library.custom_op("archsearch::head_loss_forward", mutates_args=())
def _forward(
    hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor, weights_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss of each row, log2 of its sum of exponentials, and the gradient of hidden."""
    M, N, D = hidden_MND.shape
    V, P = head_MVD.shape[1], _padded(hidden_MND)
    hidden_MND, head_MVD = _dense(hidden_MND), _dense(head_MVD)
    blocks = _blocks(FORWARD, hidden_MND, P)
    row_blocks = triton.cdiv(N, blocks.rows)
    each, splits = _split(triton.cdiv(V, blocks.columns), M * row_blocks, blocks)
    results = _results(hidden_MND)
    parts: tuple[Tensor, ...] = results[:1] * 3  # not touched
    if splits > 1:
        best_MSN, total_MSN = results[0].new_empty(2, M, splits, N)
        parts = (best_MSN, total_MSN, results[0].new_empty(M, splits, N, D))
    labels_N, weights = labels_N.contiguous(), _weights(weights_N, results[0])
    tensors = (hidden_MND, head_MVD, labels_N, weights, *results, *parts)
    strides = (*hidden_MND.stride()[:2], *head_MVD.stride()[:2])
    sizes = {"D": D, "P": P, "WEIGHTED": weights_N is not None}
    with torch.cuda.device_of(hidden_MND):
        triton_programs.forward[(row_blocks, M, splits)](
            *tensors,
            N,
            V,
            *strides,
            1 / N,
            each,
            **sizes,
            R=blocks.rows,
            C=blocks.columns,
            CHECK=V % blocks.columns != 0,
            SPLIT=splits > 1,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if splits > 1:
            triton_programs.combine[(triton.cdiv(N, _COMBINED_ROWS), M)](
                *tensors, N, *strides, 1 / N, splits, **sizes, R=_COMBINED_ROWS
            )
    return results


@_forward.register_fake
def _(
    hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor, weights_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(hidden_MND)


def _results(hidden_MND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what the forward pass returns."""
    loss_MN = hidden_MND.new_empty(hidden_MND.shape[:2], dtype=torch.float32)
    return loss_MN, torch.empty_like(loss_MN), hidden_MND.new_empty(hidden_MND.shape)


@torch.library.custom_op("archsearch::head_loss_backward", mutates_args=())
def _backward(
    hidden_MND: Tensor,
    head_MVD: Tensor,
    labels_N: Tensor,
    weights_N: Tensor | None,
    log_total_MN: Tensor,
    d_loss_M: Tensor,
) -> Tensor:
    """Gradient of the head, in its dtype."""
    M, N, D = hidden_MND.shape
    V, P = head_MVD.shape[1], _padded(hidden_MND)
    hidden_MND, head_MVD = _dense(hidden_MND), _dense(head_MVD)
    blocks = _blocks(BACKWARD, hidden_MND, P)
    column_blocks = triton.cdiv(V, blocks.columns)
    each, splits = _split(triton.cdiv(N, blocks.rows), M * column_blocks, blocks)
    dtype = head_MVD.dtype if splits == 1 else torch.float32
    d_head_MSVD = head_MVD.new_empty(M, splits, V, D, dtype=dtype)
    with torch.cuda.device_of(hidden_MND):
        triton_programs.backward[(column_blocks, M, splits)](
            hidden_MND,
            head_MVD,
            labels_N.contiguous(),
            _weights(weights_N, log_total_MN),
            log_total_MN,
            d_loss_M.contiguous(),
            d_head_MSVD,
            N,
            V,
            *hidden_MND.stride()[:2],
            *head_MVD.stride()[:2],
            1 / N,
            each,
            D=D,
            P=P,
            R=blocks.rows,
            C=blocks.columns,
            CHECK=N % blocks.rows != 0,
            WEIGHTED=weights_N is not None,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return d_head_MSVD[:, 0] if splits == 1 else d_head_MSVD.sum(1).to(head_MVD.dtype)


@_backward.register_fake
def _(
    hidden_MND: Tensor,
    head_MVD: Tensor,
    labels_N: Tensor,
    weights_N: Tensor | None,
    log_total_MN: Tensor,
    d_loss_M: Tensor,
) -> Tensor:
    return head_MVD.new_empty(head_MVD.shape)


def _weights(weights_N: Tensor | None, other: Tensor) -> Tensor:
    """Weights as programs read them; `other`, which they then do not, where there are none."""
    return other if weights_N is None else weights_N.float().contiguous()


def _padded(hidden_MND: Tensor) -> int:
    """Width of a tile: a power of two, no less than what a matrix unit takes."""
    width = hidden_MND.shape[2]
    if width > WIDEST_TRITON:
        raise ValueError(
            f"the head's backend 'triton' takes widths up to {WIDEST_TRITON}, not {width}; "
            "use 'blocked'"
        )
    if hidden_MND.dtype == torch.float64:
        raise ValueError("the head's backend 'triton' takes no float64; use 'blocked'")
    padded: int = triton.next_power_of_2(max(width, 16))
    return padded


def _blocks(table: dict[int, Blocks], hidden_MND: Tensor, padded: int) -> Blocks:
    return table[padded] if hidden_MND.dtype.itemsize < 4 else _SINGLE


def _split(blocks: int, programs: int, kind: Blocks) -> tuple[int, int]:
    """Blocks of each part and number of parts that make enough programs; no part is empty."""
    wanted = max(1, min(blocks, kind.resident * _PROCESSORS // programs))
    each = -(-blocks // wanted)
    return each, -(-blocks // each)


def _dense(x: Tensor) -> Tensor:
    """Programs take any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()
