"""Queries at places of their own read what they read in a whole sequence, gradients included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from archsearch_kernels.attention import attention
from archsearch_kernels.linear_attention import linear_attention
from archsearch_kernels.linear_attention.feature_maps import MAPS
from archsearch_kernels.short_conv import short_conv
from archsearch_kernels.sliding_window import sliding_window
from torch import Tensor

from archsearch.mixer import rows

EXACT = 1e-10
"""fp64 has 16 digits; a hundred terms of size 1 in another order lose two or three."""
B, T, H, K = 3, 13, 2, 4
AT = torch.tensor([[12, 0, 5, 5], [1, 2, 3, 11], [7, 6, 0, 12]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def assert_same_at(
    op: Callable[..., Tensor], q: Tensor, others: dict[str, Tensor], *, picks: bool = True
) -> None:
    """The op of some queries, against rows of the op of all."""
    inputs = [x.requires_grad_() for x in (q, *others.values())]
    given = dict(zip(others, inputs[1:], strict=True))
    some = op(rows(inputs[0], AT) if picks else inputs[0], **given, at=AT)
    whole = rows(op(inputs[0], **given, at=None), AT)
    weights = torch.cos(torch.arange(some.numel(), dtype=some.dtype)).view(some.shape)
    for found, wanted in zip(
        [some, *torch.autograd.grad(some, inputs, weights)],
        [whole, *torch.autograd.grad(whole, inputs, weights)],
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_attention(backend: str) -> None:
    def op(q: Tensor, k: Tensor, v: Tensor, at: Tensor | None) -> Tensor:
        return attention(q, k, v, at_BT=at, backend=backend)

    assert_same_at(op, normal(B, T, H, K), {"k": normal(B, T, 1, K), "v": normal(B, T, 1, K + 1)})


@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("backend", ["reference", "masked", "blocked"])
def test_sliding_window(backend: str, window: int) -> None:
    def op(q: Tensor, k: Tensor, v: Tensor, at: Tensor | None) -> Tensor:
        return sliding_window(q, k, v, window=window, at_BT=at, backend=backend)

    assert_same_at(op, normal(B, T, H, K), {"k": normal(B, T, 1, K), "v": normal(B, T, 1, K + 1)})


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("feature_map", sorted(MAPS))
@pytest.mark.parametrize("backend", ["reference", "quadratic", "chunked"])
def test_linear_attention(backend: str, feature_map: str, carried: bool) -> None:
    options: dict[str, Any] = {"feature_map": feature_map, "keep_state": False}
    if feature_map == "performer":
        options["projection_PK"] = normal(6, K)
    if feature_map == "cosformer":
        options |= {"position_BT": torch.arange(T)[None], "max_len": 11}
    others = {"k": normal(B, T, H, K, seed=1), "v": normal(B, T, H, K + 1, seed=2)}
    if carried:
        options["log_decay_H"] = -torch.rand(H, dtype=torch.float64) / 4
        first = {name: x[:, :1] for name, x in others.items()}
        begin = {name: x[:, :1] if name == "position_BT" else x for name, x in options.items()}
        _, memory, normaliser = linear_attention(
            first["k"], first["k"], first["v"], **begin | {"keep_state": True}, backend="reference"
        )
        options |= {"memory_BHFV": memory, "normaliser_BHF": normaliser}
    exists_BT = torch.arange(T) != 4

    def op(q: Tensor, k: Tensor, v: Tensor, at: Tensor | None) -> Tensor:
        exists = exists_BT.expand(B, -1)
        y, _, _ = linear_attention(q, k, v, exists_BT=exists, at_BT=at, **options, backend=backend)
        return y

    assert_same_at(op, normal(B, T, H, K), others)


def test_short_conv() -> None:
    def op(x: Tensor, w: Tensor, b: Tensor, tail: Tensor, at: Tensor | None) -> Tensor:
        return short_conv(x, w, b, tail_BPC=tail, at_BK=at, backend="reference")[0]

    others = {"w": normal(K, 3), "b": normal(K), "tail": normal(B, 2, K)}
    assert_same_at(op, normal(B, T, K), others, picks=False)
