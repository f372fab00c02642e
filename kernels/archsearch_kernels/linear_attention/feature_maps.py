"""The feature maps of linear attention by name; their equations stand in the package.

A map is made in two parts. The first, `mapped`, is applied to queries and keys at once. The second
is an `Expansion`, which backends apply where they need it: a Taylor map has many features, and its
similarities need none of them.

Shape suffixes: B batch, T tokens (S where they are keys), H heads, K size of a query or key, P
random features, N blocks of them, F features.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.linear_attention import taylor


class Expansion(NamedTuple):
    """Features of a vector, and phi(q).phi(k) of all queries and keys without making them."""

    features: Callable[[Tensor], Tensor]
    similarity: Callable[[Tensor, Tensor], Tensor]
    """(query_TK, key_SK) to weight_TS."""


class FeatureMap(NamedTuple):
    """How many features of (key size, random features), and the second part of the map."""

    size: Callable[[int, int], int]
    expansion: Expansion


def elu(x_K: Tensor) -> Tensor:
    """1 + ELU(x), written so that it is above 0 where 1 + (exp(x) - 1) rounds to 0."""
    return torch.where(x_K > 0, x_K + 1, x_K.clamp(max=0).exp())


def relu(x_K: Tensor) -> Tensor:
    """The positive part."""
    return F.relu(x_K)


def performer(x_K: Tensor, projection_PK: Tensor) -> Tensor:
    """Positive random features of the softmax kernel."""
    size, (count, _) = x_K.shape[-1], projection_PK.shape
    u_K = x_K * size**-0.25
    half_length = u_K.square().sum(-1, keepdim=True) / 2
    exponent_P: Tensor = u_K @ projection_PK.to(u_K.dtype).mT - half_length
    return exponent_P.exp() / math.sqrt(count)


def cosformer(x_BTHK: Tensor, position_BT: Tensor, max_len: int) -> Tensor:
    """The positive part by the cosine and by the sine of a quarter turn over `max_len` tokens.

    Positions end at max_len - 1: no two are a quarter turn apart, and no product is below 0.
    """
    turn_BT = position_BT.clamp(max=max_len - 1).to(x_BTHK.dtype) * (math.pi / 2 / max_len)
    turn_BT11, positive_BTHK = turn_BT[..., None, None], F.relu(x_BTHK)
    return torch.cat((positive_BTHK * turn_BT11.cos(), positive_BTHK * turn_BT11.sin()), dim=-1)


def orthogonal_projection(count: int, size: int) -> Tensor:
    """Draw rows for `performer`, (P, K): in blocks of K orthogonal ones, as long as normal ones.

    Each row alone is distributed as N(0, 1), which makes the kernel right on average; rows of one
    block differ as much as they can, which lowers its variance (arXiv:2009.14794, section 2.4).
    """
    rows_NKK, upper_NKK = torch.linalg.qr(torch.randn(math.ceil(count / size), size, size))
    # The factorisation fixes signs; without them, a direction is as likely as its opposite.
    rows_NKK = rows_NKK * upper_NKK.diagonal(dim1=1, dim2=2).sign()[:, None]
    lengths_P1: Tensor = torch.linalg.vector_norm(torch.randn(count, size), dim=-1, keepdim=True)
    rows_PK: Tensor = rows_NKK.mT.flatten(0, 1)[:count]
    return rows_PK * lengths_P1


def mapped(
    feature_map: str,
    x_BTHK: Tensor,
    projection_PK: Tensor | None,
    position_BT: Tensor | None,
    max_len: int | None,
) -> Tensor:
    """Apply the first part of a map; a Taylor map has none.

    Raises:
        ValueError: `performer` without a projection, `cosformer` without positions.
    """
    if feature_map == "elu":
        return elu(x_BTHK)
    if feature_map == "relu":
        return relu(x_BTHK)
    if feature_map == "performer":
        if projection_PK is None:
            raise ValueError("the feature map 'performer' needs projection_PK")
        return performer(x_BTHK, projection_PK)
    if feature_map == "cosformer":
        if position_BT is None or max_len is None:
            raise ValueError("the feature map 'cosformer' needs position_BT and max_len")
        return cosformer(x_BTHK, position_BT, max_len)
    return x_BTHK


def expansion_of(feature_map: str) -> Expansion:
    """The second part of a map."""
    return MAPS[feature_map].expansion


def features_of(expansion: Expansion, x_BTHK: Tensor, exists_BT: Tensor | None) -> Tensor:
    """Features of keys, zero where a token is padding: after the map, which may turn 0 into 1."""
    x_BTHF = expansion.features(x_BTHK)
    return x_BTHF if exists_BT is None else x_BTHF * exists_BT[..., None, None]


def _products(query_TF: Tensor, key_SF: Tensor) -> Tensor:
    return query_TF @ key_SF.mT


_NONE = Expansion(lambda x_K: x_K, _products)

MAPS = {
    "taylor": FeatureMap(
        lambda size, _: 1 + size + size * (size + 1) // 2,
        Expansion(taylor.features, taylor.similarities),
    ),
    "taylor_full": FeatureMap(
        lambda size, _: 1 + size + size**2,
        Expansion(taylor.full_features, taylor.similarities),
    ),
    "elu": FeatureMap(lambda size, _: size, _NONE),
    "relu": FeatureMap(lambda size, _: size, _NONE),
    "performer": FeatureMap(lambda _, count: count, _NONE),
    "cosformer": FeatureMap(lambda size, _: 2 * size, _NONE),
}
