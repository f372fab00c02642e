"""Dropout whose mask is a pure function of a key and of the place, not of a generator.

One key gives one mask on every device, alone or under vmap, and captured work needs no generator
state.
"""

import torch
from torch import Tensor


def hash32(x: Tensor) -> Tensor:
    """Map integers to 32-bit ones that look random: Wellons' `lowbias32`, in int64 arithmetic."""
    low = 0xFFFFFFFF
    x = x & low
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * multiplier & low
    return x ^ x >> 16


def drop(x: Tensor, share: float, key: Tensor) -> Tensor:
    """Set a `share` of the features to zero and scale the others by 1 / (1 - share).

    The lower 32 bits of the key decide the mask.
    """
    return x * ~struck(x, share, key) / (1 - share)


def struck(x: Tensor, share: float, key: Tensor) -> Tensor:
    """True at a `share` of the places of x. The lower 32 bits of the key decide which."""
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    return hash32(index + hash32(key)) < int(share * 2**32)
