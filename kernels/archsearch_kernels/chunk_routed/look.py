"""Softmax over weighted keys: weights that may be zero, and still have a derivative.

    z = sum_j f_j exp(a_j) v_j / sum_j f_j exp(a_j)

Exponents are taken relative to the largest score of positive weight, so that a softmax over those
is exact whatever the others are. Shape suffixes: B batch, T queries, J keys, A heads, I and U sizes
of keys and values.
"""

import torch
from torch import Tensor

STEEPEST = 60.0
"""Largest exponent of a key without weight; only a derivative at weight zero feels it."""


def look(q_BTAI: Tensor, k_BJAI: Tensor, v_BJAU: Tensor, factor_BATJ: Tensor) -> Tensor:
    """Return z_BTAU; zeros where no key has weight. All of one dtype, the one of sums."""
    score_BATJ = torch.einsum("btai,bjai->batj", q_BTAI, k_BJAI) * q_BTAI.shape[-1] ** -0.5
    seen = score_BATJ.detach().masked_fill(factor_BATJ <= 0, -torch.inf)
    highest = seen.amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weight_BATJ = factor_BATJ * (score_BATJ - highest).clamp(max=STEEPEST).exp()
    total_BTA1 = weight_BATJ.sum(-1).transpose(1, 2)[..., None]
    summed_BTAU = torch.einsum("batj,bjau->btau", weight_BATJ, v_BJAU)
    z_BTAU: Tensor = summed_BTAU / (total_BTA1 + (total_BTA1 == 0))
    return z_BTAU
