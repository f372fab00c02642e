"""Rotary position embedding (Su et al., arXiv:2104.09864, eq. 34), first half against second half.

The inner product of two rotated vectors depends on the difference of their positions only. Angles
are computed in fp64: in fp32 the angle at position 100 000 is off by up to 0.004 rad.

Shape suffixes: B batch, T tokens, H heads, K head size.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator

BASE = 10_000.0
"""Of the published embedding: two numbers turn once in 2 pi to 2 pi times this many tokens."""


def rotate(x_BTHK: Tensor, position: Tensor, base: float = BASE) -> Tensor:
    """Rotate every head by its token's position; K is even.

    Args:
        x_BTHK: queries or keys, any floating dtype; the result has the same.
        position: integer positions, (T,) for all sequences or (B, T) for each.
        base: at least 1; a larger one turns the later numbers more slowly.
    """
    half = x_BTHK.shape[-1] // 2
    exponent = torch.arange(half, device=x_BTHK.device, dtype=torch.float64) / half
    angle = position.unsqueeze(-1) * base**-exponent
    compute = accumulator(x_BTHK.dtype)
    cos, sin = angle.cos().to(compute).unsqueeze(-2), angle.sin().to(compute).unsqueeze(-2)
    first, second = x_BTHK.to(compute).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.to(x_BTHK.dtype)
