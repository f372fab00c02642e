"""Length and root-mean-square norms over the last dimension; squares are summed in fp32 at least.

Shape suffixes: K numbers that are scaled together, after any other dimensions.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator

EPSILON = 1e-6
"""Added to sums of squares, so that zeros stay zeros."""


def unit(x_K: Tensor) -> Tensor:
    """Scale to length 1, in the dtype of x."""
    wide = x_K.to(accumulator(x_K.dtype))
    length = wide.square().sum(-1, keepdim=True)
    return (wide * torch.rsqrt(length + EPSILON)).to(x_K.dtype)


def rms_norm(x_K: Tensor, weight_K: Tensor | float = 1.0) -> Tensor:
    """Scale to root mean square 1, then by a weight."""
    y_K: Tensor = unit(x_K) * (weight_K * x_K.shape[-1] ** 0.5)
    return y_K
