"""The Taylor feature map, compact and full (BASED, arXiv:2402.18668, eq. 4 and appendix E.2).

With u = x / K^(1/4), the compact form is [1, u_a, u_a^2 / sqrt(2), u_a u_b for a < b]: each cross
term once. The full form is [1, u_a, u_a u_b / sqrt(2) for all a and b]. Of both
phi(q).phi(k) = 1 + t + t^2/2 for t = q.k / sqrt(K).

Shape suffixes: K size of a query or key, F features of it, T queries, S keys.
"""

import torch
from torch import Tensor


def features(x_K: Tensor) -> Tensor:
    """Map the last dimension from K to 1 + K + K(K+1)/2; the dtype stays.

    Cross terms stand by the distance of a and b around a circle of K, at most K/2: a slice for each
    distance, which is several times faster than gathering pairs, above all backwards.
    """
    size = x_K.shape[-1]
    u_K = x_K * size**-0.25
    circle = torch.cat((u_K, u_K), dim=-1)
    parts = [torch.ones_like(u_K[..., :1]), u_K, u_K.square() * 0.5**0.5]
    for distance in range(1, size // 2 + 1):
        count = size if 2 * distance < size else distance  # half around, every pair comes twice
        parts.append(u_K[..., :count] * circle[..., distance : distance + count])
    return torch.cat(parts, dim=-1)


def full_features(x_K: Tensor) -> Tensor:
    """Map the last dimension from K to 1 + K + K^2; the dtype stays."""
    u_K = x_K * x_K.shape[-1] ** -0.25
    products = (u_K[..., :, None] * u_K[..., None, :]).flatten(-2) * 0.5**0.5
    return torch.cat((torch.ones_like(u_K[..., :1]), u_K, products), dim=-1)


def similarity(score: Tensor) -> Tensor:
    """Return phi(q).phi(k) = 1 + t + t^2/2 for scores t = q.k / sqrt(K)."""
    return 1 + score + 0.5 * score.square()


def similarities(q_TK: Tensor, k_SK: Tensor) -> Tensor:
    """Return phi(q).phi(k) of all queries and keys, (T, S)."""
    return similarity((q_TK * q_TK.shape[-1] ** -0.5) @ k_SK.mT)
