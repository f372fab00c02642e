"""The Taylor feature map in compact form (BASED, arXiv:2402.18668, eq. 4 and appendix E.2).

With u = x / K^(1/4), phi(x) = [1, u_a, u_a^2 / sqrt(2), u_a u_b for a < b]: each cross term once,
so that phi(q).phi(k) = 1 + t + t^2/2 for t = q.k / sqrt(K).

Shape suffixes: K size of a query or key, F = 1 + K + K(K+1)/2 features.
"""

import torch
from torch import Tensor


def features(x_K: Tensor) -> Tensor:
    """Map the last dimension from K to F; the dtype stays."""
    size = x_K.shape[-1]
    first, second = torch.triu_indices(size, size, device=x_K.device)
    weight = 1 - (first == second).to(x_K.dtype) * (1 - 0.5**0.5)
    u_K = x_K * size**-0.25
    products = u_K[..., first] * u_K[..., second] * weight
    return torch.cat((torch.ones_like(u_K[..., :1]), u_K, products), dim=-1)


def similarity(score: Tensor) -> Tensor:
    """Return phi(q).phi(k) = 1 + t + t^2/2 for scores t = q.k / sqrt(K)."""
    return 1 + score + 0.5 * score.square()
