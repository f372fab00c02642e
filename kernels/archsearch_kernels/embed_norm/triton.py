"""The embedding with its norm by the Triton programs of this folder, on CUDA.

Each pass is a custom op over members, as in `residual_norm`, whose backward programs it shares.

Shape suffixes: M members, N places, V vocabulary, D width, S slices of sorted places.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from archsearch_kernels.embed_norm import triton_programs
from archsearch_kernels.members import map_over_members
from archsearch_kernels.residual_norm import EPSILON
from archsearch_kernels.residual_norm.triton import backward as norm_backward
from archsearch_kernels.residual_norm.triton import dense, rows_of

_PLACES = 16
"""Places of a block."""

_SLICE = 256
"""Sorted places that one program adds up if they are all of one token. A token then adds up one sum
for each such slice and fewer than two slices of places: of 49,152 places at most 44 blocks, not
3,072. Not read from the device, so that sums have the same order on every card."""

_FEW = 32
"""Places of a token up to which it is added up beside others. Programs of one token each, most of
two to eight places, took 0.65 ms on an H200 whatever the batch (8,192 tokens of 16 members)."""


def embed_norm(
    tokens_N: Tensor,
    table_VD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    share: float,
    key: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `archsearch_kernels.embed_norm.embed_norm`."""
    one = [None if x is None else x.unsqueeze(0) for x in (table_VD, weight_D, bias_D)]
    key_1 = None if key is None else key.reshape(1)
    r_1ND, x_1ND = forward(tokens_N.flatten(), *one, key_1, share)
    shape = (*tokens_N.shape, table_VD.shape[-1])
    return r_1ND.view(shape), x_1ND.view(shape)


@torch.library.custom_op("archsearch::embed_norm_forward", mutates_args=())
def forward(
    tokens_N: Tensor,
    table_MVD: Tensor,
    weight_MD: Tensor,
    bias_MD: Tensor | None,
    keys_M: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor]:
    """The residual stream of every member, and its norm."""
    (M, _, D), N = table_MVD.shape, tokens_N.shape[0]
    table_MVD, weight_MD, centred = dense(table_MVD), dense(weight_MD), bias_MD is not None
    bias_MD = weight_MD if bias_MD is None else dense(bias_MD)
    r_MND = table_MVD.new_empty(M, N, D)
    x_MND, P = torch.empty_like(r_MND), triton.next_power_of_2(D)
    R = rows_of(_PLACES, P)
    with torch.cuda.device_of(table_MVD):
        triton_programs.forward[(triton.cdiv(N, R), M)](
            tokens_N, table_MVD, weight_MD, bias_MD, tokens_N if keys_M is None else keys_M,
            r_MND, x_MND, N, *table_MVD.stride()[:2], weight_MD.stride(0), bias_MD.stride(0),
            EPSILON, *_mask(share), D=D, P=P, R=R, CENTRED=centred, DROPS=keys_M is not None,
        )  # fmt: skip
    return r_MND, x_MND


@forward.register_fake
def _(
    tokens_N: Tensor,
    table_MVD: Tensor,
    weight_MD: Tensor,
    bias_MD: Tensor | None,
    keys_M: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor]:
    shape = (table_MVD.shape[0], tokens_N.shape[0], table_MVD.shape[2])
    return table_MVD.new_empty(shape), table_MVD.new_empty(shape)


@torch.library.custom_op("archsearch::embedding_gradient", mutates_args=())
def gradient(
    tokens_N: Tensor, d_r_MND: Tensor, keys_M: Tensor | None, share: float, vocab: int
) -> Tensor:
    """Gradient of every member's table, in the dtype of d_r."""
    (M, N, D), P = d_r_MND.shape, triton.next_power_of_2(d_r_MND.shape[2])
    drops = keys_M is not None
    sorted_N, order_N = tokens_N.sort(stable=True)
    every_V1 = torch.arange(vocab + 1, device=tokens_N.device)
    first_V1 = torch.searchsorted(sorted_N, every_V1)
    d_r_MND, d_table_MVD = d_r_MND.contiguous(), d_r_MND.new_empty(M, vocab, D)
    S, R, keys_M = N // _SLICE, rows_of(_PLACES, P), tokens_N if keys_M is None else keys_M
    parts_MSD = d_r_MND.new_empty(M, S, D, dtype=torch.float32)
    options = {"D": D, "P": P, "R": R, "L": _SLICE, "DROPS": drops}
    with torch.cuda.device_of(d_r_MND):
        if S:
            triton_programs.slices[(S, M)](
                d_r_MND, sorted_N, order_N, keys_M, parts_MSD, N, *_mask(share), **options
            )
        triton_programs.gradient[(triton.cdiv(vocab, R), M)](
            d_r_MND, order_N, first_V1, keys_M, parts_MSD, d_table_MVD, N, vocab, *_mask(share),
            FEW=_FEW, **options,
        )  # fmt: skip
    return d_table_MVD


@gradient.register_fake
def _(tokens_N: Tensor, d_r_MND: Tensor, keys_M: Tensor | None, share: float, vocab: int) -> Tensor:
    return d_r_MND.new_empty(d_r_MND.shape[0], vocab, d_r_MND.shape[2])


def _mask(share: float) -> tuple[int, float]:
    """Hashes below the first number are dropped; what is kept is multiplied by the second."""
    return int(share * 2**32), 1 / (1 - share)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens_N, table_MVD, weight_MD, bias_MD, keys_M, share = inputs
    ctx.save_for_backward(tokens_N, output[0], weight_MD, keys_M)
    ctx.vocab, ctx.centred, ctx.share = table_MVD.shape[1], bias_MD is not None, share


def _gradients(ctx: Any, d_r_MND: Tensor, d_x_MND: Tensor) -> tuple[Tensor | None, ...]:
    tokens_N, r_MND, weight_MD, keys_M = ctx.saved_tensors
    d_MND, d_weight_MD, d_bias_MD = norm_backward(d_r_MND, d_x_MND, r_MND, weight_MD, ctx.centred)
    d_table_MVD = gradient(tokens_N, d_MND, keys_M, ctx.share, ctx.vocab)
    return None, d_table_MVD, d_weight_MD, d_bias_MD if ctx.centred else None, None, None


forward.register_autograd(_gradients, setup_context=_save)
for _op in (forward, gradient):
    map_over_members(_op, shared=frozenset((0,)))
