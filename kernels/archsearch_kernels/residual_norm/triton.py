"""The residual norm by the Triton programs of this folder, on CUDA.

Each pass is a custom op over members with fake, autograd and vmap rules: it can be traced, compiled
around, mapped over a population and captured in a CUDA graph. Nothing is timed, nothing read back,
and no atomics are used.

Shape suffixes: M members, N rows of each, D width, S programs of one member.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from archsearch_kernels.members import map_over_members
from archsearch_kernels.residual_norm import EPSILON, triton_programs

_FORWARD_ROWS, _BACKWARD_ROWS = 16, 8
"""Rows of a block: of several the fastest at a width of 128 on an H200, with 4 warps."""

_TILE = 4096
"""Most numbers of a tile; wider rows come in smaller blocks."""

_PROGRAMS = 8 * 132
"""Programs of a backward pass: eight for each multiprocessor of an H200. Not read from the device,
so that sums have the same order on every card."""


def residual_norm(
    r_ND: Tensor, y_ND: Tensor, weight_D: Tensor, bias_D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `archsearch_kernels.residual_norm.residual_norm`."""
    r_1ND, y_1ND = (x.reshape(1, -1, x.shape[-1]) for x in (r_ND, y_ND))
    bias_1D = None if bias_D is None else bias_D.unsqueeze(0)
    s_1ND, x_1ND = forward(r_1ND, y_1ND, weight_D.unsqueeze(0), bias_1D)
    return s_1ND.view(r_ND.shape), x_1ND.view(r_ND.shape)


def rows_of(block: int, padded: int) -> int:
    """Rows of a block whose tile is not too large."""
    rows: int = max(1, min(block, _TILE // padded))
    return rows


def programs_of(members: int, rows: int, block: int) -> int:
    """Programs of one member in a backward pass."""
    programs: int = max(1, min(triton.cdiv(rows, block), triton.cdiv(_PROGRAMS, members)))
    return programs


@torch.library.custom_op("archsearch::residual_norm_forward", mutates_args=())
def forward(
    r_MND: Tensor, y_MND: Tensor, weight_MD: Tensor, bias_MD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum and normed sum."""
    r_MND, y_MND = r_MND.contiguous(), y_MND.contiguous()
    (M, N, D), P = r_MND.shape, triton.next_power_of_2(r_MND.shape[2])
    weight_MD, centred = dense(weight_MD), bias_MD is not None
    bias_MD = weight_MD if bias_MD is None else dense(bias_MD)
    s_MND, x_MND = torch.empty_like(r_MND), torch.empty_like(r_MND)
    R = rows_of(_FORWARD_ROWS, P)
    if N:
        with torch.cuda.device_of(r_MND):
            triton_programs.forward[(triton.cdiv(N, R), M)](
                r_MND, y_MND, weight_MD, bias_MD, s_MND, x_MND, N,
                weight_MD.stride(0), bias_MD.stride(0), EPSILON, D=D, P=P, R=R, CENTRED=centred,
            )  # fmt: skip
    return s_MND, x_MND


@forward.register_fake
def _(
    r_MND: Tensor, y_MND: Tensor, weight_MD: Tensor, bias_MD: Tensor | None
) -> tuple[Tensor, Tensor]:
    return r_MND.new_empty(r_MND.shape), r_MND.new_empty(r_MND.shape)


@torch.library.custom_op("archsearch::residual_norm_backward", mutates_args=())
def backward(
    d_s_MND: Tensor, d_x_MND: Tensor, s_MND: Tensor, weight_MD: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of r (and of y), of weight, and of bias, which is empty without one."""
    d_s_MND, d_x_MND, weight_MD = d_s_MND.contiguous(), d_x_MND.contiguous(), dense(weight_MD)
    (M, N, D), P = s_MND.shape, triton.next_power_of_2(s_MND.shape[2])
    R = rows_of(_BACKWARD_ROWS, P)
    S = programs_of(M, N, R)
    d_MND = torch.empty_like(s_MND)
    parts_2MSD = s_MND.new_empty(2, M, S, D, dtype=torch.float32)
    with torch.cuda.device_of(s_MND):
        triton_programs.backward[(S, M)](
            d_s_MND, d_x_MND, s_MND, weight_MD, d_MND, parts_2MSD[0], parts_2MSD[1], N,
            weight_MD.stride(0), EPSILON, D=D, P=P, R=R, CENTRED=centred,
        )  # fmt: skip
    d_weight_MD = parts_2MSD[0].sum(1).to(weight_MD.dtype)
    d_bias_MD = parts_2MSD[1].sum(1).to(weight_MD.dtype) if centred else d_weight_MD[:, :0].clone()
    return d_MND, d_weight_MD, d_bias_MD


@backward.register_fake
def _(
    d_s_MND: Tensor, d_x_MND: Tensor, s_MND: Tensor, weight_MD: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    M, D = weight_MD.shape
    d_bias_MD = weight_MD.new_empty(M, D if centred else 0)
    return s_MND.new_empty(s_MND.shape), weight_MD.new_empty(M, D), d_bias_MD


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight_MD, bias_MD = inputs
    ctx.save_for_backward(output[0], weight_MD)
    ctx.centred = bias_MD is not None


def _gradients(ctx: Any, d_s_MND: Tensor, d_x_MND: Tensor) -> tuple[Tensor | None, ...]:
    d_MND, d_weight_MD, d_bias_MD = backward(d_s_MND, d_x_MND, *ctx.saved_tensors, ctx.centred)
    return d_MND, d_MND, d_weight_MD, d_bias_MD if ctx.centred else None


forward.register_autograd(_gradients, setup_context=_save)
for _op in (forward, backward):
    map_over_members(_op)


def dense(x: Tensor) -> Tensor:
    """Programs take any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()
