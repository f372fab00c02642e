"""The long convolution by Fourier transforms of dyadic blocks: order T log^2 T, and causal bit by
bit.

One transform of the whole sequence would spread the rounding of late inputs over early outputs. So
a block only ever contributes to the block after it: inside blocks of 32 tokens the sum is a product
with a Toeplitz matrix; then, for blocks of 32, 64, 128, ... tokens, each first half of a pair adds
to the second half by a transform of twice its length. This is the multiplication of power series as
they arrive (van der Hoeven, Relax but don't be too lazy, 2002). Once blocks are as long as the
filter, each reaches the next one only, and one more round over all neighbours is the last.

The tail lies before everything and takes one transform. A single token takes a plain sum.

Shape suffixes: B batch, T tokens, C channels, J taps, P = J - 1 tokens carried in, N blocks, S and
L tokens of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.long_conv import reference
from archsearch_kernels.precision import accumulator

BLOCK = 32
"""Tokens of the blocks that are summed directly."""


def long_conv(x_BTC: Tensor, filter_JC: Tensor, *, tail_BPC: Tensor | None) -> Tensor:
    """See `archsearch_kernels.long_conv.long_conv`; returns the output only."""
    T, J = x_BTC.shape[1], filter_JC.shape[0]
    if T == 1:
        return reference.long_conv(x_BTC, filter_JC, tail_BPC=tail_BPC)
    compute = accumulator(x_BTC.dtype)
    x_BCT = x_BTC.transpose(1, 2).to(compute)
    filter_CJ = filter_JC.transpose(0, 1).to(compute)
    y_BCT = _inside(x_BCT, filter_CJ, min(BLOCK, T))
    size = BLOCK
    while size < T:
        last = size >= J - 1
        y_BCT = y_BCT + _to_next(x_BCT, filter_CJ, size, every=last)
        size = T if last else 2 * size
    if tail_BPC is not None:
        y_BCT = y_BCT + _from_tail(tail_BPC.transpose(1, 2).to(compute), filter_CJ, T)
    return y_BCT.transpose(1, 2).to(x_BTC.dtype)


def _inside(x_BCT: Tensor, filter_CJ: Tensor, size: int) -> Tensor:
    """What each block of `size` tokens adds to itself."""
    taps = filter_CJ[:, :size]
    padded = F.pad(taps, (size - 1, size - taps.shape[1]))
    toeplitz_CSL = padded.unfold(-1, size, 1).flip(-1)  # row s, column l: tap s - l, 0 if negative
    x_BCNL = _in_blocks(x_BCT, size)
    y_BCNS = torch.einsum("csl,bcnl->bcns", toeplitz_CSL, x_BCNL)
    return y_BCNS.flatten(-2)[..., : x_BCT.shape[-1]]


def _to_next(x_BCT: Tensor, filter_CJ: Tensor, size: int, *, every: bool) -> Tensor:
    """What blocks of `size` tokens add to the next block: every block, or the first of each pair.

    A cyclic convolution of length 2 * size wraps into its first half only, which is not read.
    """
    T = x_BCT.shape[-1]
    x_BCNS = _in_blocks(x_BCT, size)[..., :-1, :]
    if not every:
        x_BCNS = x_BCNS[..., ::2, :]
    spectrum = torch.fft.rfft(x_BCNS, n=2 * size)
    taps = torch.fft.rfft(filter_CJ[:, : 2 * size], n=2 * size)
    y_BCNS = torch.fft.irfft(spectrum * taps[:, None], n=2 * size)[..., size:]
    if not every:
        y_BCNS = torch.stack((torch.zeros_like(y_BCNS), y_BCNS), dim=-2)
    y_BCT = F.pad(y_BCNS.flatten(2), (size if every else 0, 0))
    return F.pad(y_BCT, (0, T - y_BCT.shape[-1]))


def _from_tail(tail_BCP: Tensor, filter_CJ: Tensor, tokens: int) -> Tensor:
    """What the inputs before the first add to all outputs."""
    past = tail_BCP.shape[-1]
    if past == 0:
        return torch.zeros_like(filter_CJ[:, :1])
    length = 1 << (past + tokens - 1).bit_length()
    spectrum = torch.fft.rfft(tail_BCP, n=length) * torch.fft.rfft(filter_CJ, n=length)
    y_BCL: Tensor = torch.fft.irfft(spectrum, n=length)
    return y_BCL[..., past : past + tokens]


def _in_blocks(x_BCT: Tensor, size: int) -> Tensor:
    """Pad T to whole blocks and return (B, C, N, S)."""
    x_BCNS: Tensor = F.pad(x_BCT, (0, -x_BCT.shape[-1] % size)).unflatten(-1, (-1, size))
    return x_BCNS
