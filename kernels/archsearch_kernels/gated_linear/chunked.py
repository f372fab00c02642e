"""Gated linear attention in chunks, linear in T (arXiv:2312.06635, section 4; arXiv:2405.21060).

The memory goes from chunk to chunk; inside, a chunk is the parallel form. That form needs an
exponential for every pair of tokens and channel where each channel has its own decay, so such a
chunk is cut further: only blocks of 16 tokens look at pairs. Twice as many tokens are two halves:
the later one reads the memory that the earlier one leaves behind, where every exponent counts from
the seam between them, and none is above 0. Two such rounds make a chunk of 64.

Shape suffixes: B batch, T tokens, H heads, G heads of queries and keys (H or 1), K key size, V
value size, R decays of a head (K or 1), N chunks, C tokens of a chunk, M pairs of halves, S tokens
of a half.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.gated_linear import reference
from archsearch_kernels.gated_linear.parallel import NO_MEMORY, read, weights, written
from archsearch_kernels.precision import accumulator

CHUNK = 64
"""Tokens of a chunk at most."""

BLOCK = 16
"""Tokens that are looked at in pairs where every channel has its own decay."""


def gated_linear(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHR: Tensor,
    *,
    state_BHKV: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.gated_linear.gated_linear`."""
    tensors, T = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTHR), v_BTHV.shape[1]
    if T == 1:  # a step of decoding is the definition as it stands
        return reference.gated_linear(*tensors, state_BHKV=state_BHKV, keep_state=keep_state)
    compute = accumulator(q_BTGK.dtype)
    block = min(T, CHUNK if log_decay_BTHR.shape[-1] == 1 else BLOCK)
    chunk = block
    while chunk < min(T, CHUNK):
        chunk *= 2
    q, k, v = (_in_chunks(x.to(compute), chunk) for x in tensors[:3])
    sum_BHNCR = _in_chunks(log_decay_BTHR.double().clamp(NO_MEMORY), chunk).cumsum(-2)
    y_BHNCV = _within(q, k, v, sum_BHNCR, block)
    starts_BHNKV, memory_BHKV = _memories(k, v, sum_BHNCR, state_BHKV, keep_state)
    if starts_BHNKV is not None:
        y_BHNCV = y_BHNCV + read(q, sum_BHNCR, starts_BHNKV)
    y_BTHV = y_BHNCV.flatten(2, 3)[:, :, :T].transpose(1, 2).to(q_BTGK.dtype)
    return y_BTHV, memory_BHKV


def _within(q: Tensor, k: Tensor, v: Tensor, total: Tensor, block: int) -> Tensor:
    """What the tokens of each chunk read of that chunk, (B, H, N, C, V)."""
    own = [x.unflatten(-2, (-1, block)) for x in (q, k, v, total)]
    y_BHNCV: Tensor = (weights(own[0], own[1], own[3]) @ own[2]).flatten(-3, -2)
    half = block
    while half < v.shape[-2]:
        q_MSK, k_MSK, v_MSV, sum_MSR = (x.unflatten(-2, (-1, 2, half)) for x in (q, k, v, total))
        early_MSR, late_MSR = sum_MSR.unbind(-3)
        memory_MKV = written(k_MSK[..., 0, :, :], v_MSV[..., 0, :, :], early_MSR)
        y_MSV = read(q_MSK[..., 1, :, :], late_MSR - early_MSR[..., -1:, :], memory_MKV)
        y_M2SV = torch.stack((torch.zeros_like(y_MSV), y_MSV), dim=-3)
        y_BHNCV = y_BHNCV + y_M2SV.flatten(-4, -2)
        half *= 2
    return y_BHNCV


def _memories(
    k: Tensor, v: Tensor, total: Tensor, state_BHKV: Tensor | None, keep_state: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The memory before each chunk (None: all empty), and the last one (None: not kept)."""
    N = v.shape[2]
    if N == 1 and not keep_state:
        return None if state_BHKV is None else state_BHKV[:, :, None], None
    written_BHNKV = written(k, v, total)
    decay_BHNR1 = total[..., -1:, :].mT.to(v.dtype).exp()
    memory = torch.zeros_like(written_BHNKV[:, :, 0]) if state_BHKV is None else state_BHKV
    starts = []
    for n in range(N):
        starts.append(memory)
        if keep_state or n + 1 < N:
            memory = decay_BHNR1[:, :, n] * memory + written_BHNKV[:, :, n]
    return torch.stack(starts, dim=2), memory if keep_state else None


def _in_chunks(x_BTHX: Tensor, chunk: int) -> Tensor:
    """Pad T to whole chunks and return (B, H, N, C, X). A token of zeros changes nothing."""
    padding = -x_BTHX.shape[1] % chunk
    padded = F.pad(x_BTHX, (0, 0, 0, 0, 0, padding)) if padding else x_BTHX
    x_BNCHX: Tensor = padded.unflatten(1, (-1, chunk))
    return x_BNCHX.permute(0, 3, 1, 2, 4)
