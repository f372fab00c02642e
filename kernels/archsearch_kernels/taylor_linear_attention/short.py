"""Custom ops for short sequences that begin from nothing and leave no state: through all pairs.

Up to `LONGEST_PAIRS` tokens cost less by their pairs than by their features. Queries may be fewer
than keys, each at a place of its own (`at_BS`): what a last layer is asked for in training.

Shape suffixes: B batch, T keys, S queries, H heads, K query and key size, V value size.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from archsearch_kernels.taylor_linear_attention import short_programs
from archsearch_kernels.taylor_linear_attention.launches import Inputs, prepared
from archsearch_kernels.taylor_linear_attention.shapes import Shape

KEYS = 64
"""Keys of a block, in half precision."""

SINGLE = 16
"""Queries and keys of a block in fp32."""


def _queries(S: int, operand: torch.dtype) -> int:
    """Queries of a block; few labelled positions come in small ones."""
    if operand == torch.float32:
        return SINGLE
    return 64 if S > 32 else 32 if S > 16 else 16


def _constants(shape: Shape, S: int, given: Inputs, at_BS: Tensor | None) -> dict[str, Any]:
    is_single = shape.operand == torch.float32
    return {
        "ROOT": shape.weights["ROOT"],
        "V": shape.V,
        "W": max(16, triton.next_power_of_2(shape.V)),
        "D": shape.layout.depth,
        "C": _queries(S, shape.operand),
        "N": SINGLE if is_single else KEYS,
        "MASKED": given.is_masked,
        "PLACES": at_BS is not None,
        "OPERAND": tl.float32 if is_single else tl.bfloat16,
        "STAGES": 1 if is_single else 2,
        "num_warps": 4,
    }


def _strides(given: Inputs, at_BS: Tensor) -> tuple[int, ...]:
    return *given.strides, *at_BS.stride()[:2]


@torch.library.custom_op("archsearch::taylor_short_forward", mutates_args=())
def forward(
    q_BSHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    at_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs, and denominators (K times)."""
    shape, S = Shape.of(k_BTHK, v_BTHV), q_BSHK.shape[1]
    y = v_BTHV.new_empty(shape.B, S, shape.H, shape.V)
    denominator = v_BTHV.new_empty(shape.B, S, shape.H, dtype=torch.float32)
    with torch.cuda.device_of(v_BTHV):
        given = Inputs.of(shape, q_BSHK, k_BTHK, v_BTHV, exists_BT)
        at = given.exists if at_BS is None else at_BS
        constants = _constants(shape, S, given, at_BS)
        short_programs.outputs[(shape.B * shape.H * triton.cdiv(S, constants["C"]),)](
            *(given.q, given.k, given.v, given.exists, at, y, denominator),
            *(shape.T, S, shape.H, *_strides(given, at)),
            CONSTANT=shape.weights["CONSTANT"],
            **constants,
        )
    return y, denominator


@forward.register_fake
def _(
    q_BSHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    at_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q_BSHK.shape
    denominator = v_BTHV.new_empty(B, S, H, dtype=torch.float32)
    return v_BTHV.new_empty(B, S, H, v_BTHV.shape[-1]), denominator


@torch.library.custom_op("archsearch::taylor_short_backward", mutates_args=())
def backward(
    q_BSHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    at_BS: Tensor | None,
    y_BSHV: Tensor,
    denominator_BSH: Tensor,
    dy_BSHV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    shape, S = Shape.of(k_BTHK, v_BTHV), q_BSHK.shape[1]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_BSHK, k_BTHK, v_BTHV))
    with torch.cuda.device_of(v_BTHV):
        given = Inputs.of(shape, q_BSHK, k_BTHK, v_BTHV, exists_BT)
        g, r = prepared(dy_BSHV, y_BSHV, denominator_BSH, shape.operand)
        at = given.exists if at_BS is None else at_BS
        constants = _constants(shape, S, given, at_BS) | {"K": shape.K}
        read = (given.q, given.k, given.v, g, r, given.exists, at)
        sizes = (shape.T, S, shape.H, *_strides(given, at))
        rows = shape.B * shape.H
        short_programs.query_gradients[(rows * triton.cdiv(S, constants["C"]),)](
            *read, dq, *sizes, **constants
        )
        short_programs.key_gradients[(rows * triton.cdiv(shape.T, constants["N"]),)](
            *read, dk, dv, *sizes, CONSTANT=shape.weights["CONSTANT"], **constants
        )
    return dq, dk, dv


@backward.register_fake
def _(
    q_BSHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    exists_BT: Tensor | None,
    at_BS: Tensor | None,
    y_BSHV: Tensor,
    denominator_BSH: Tensor,
    dy_BSHV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_BSHK, k_BTHK, v_BTHV))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, dy_BSHV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(*ctx.saved_tensors, dy_BSHV), None, None


forward.register_autograd(_gradients, setup_context=_save)
