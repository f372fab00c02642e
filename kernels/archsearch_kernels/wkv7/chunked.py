"""RWKV-7's time mixing in chunks (WY form; arXiv:2406.06484).

Write u_t = S_{t-1} a_t, so that S_t = S_{t-1} diag(w_t) + u_t b_t^T + v_t k_t^T. Inside a chunk,
with g_t the sum of log(w) up to and including t, and <x, z>_tj = sum_c x_c z_c exp(g_tc - g_jc),

    S_t = S_0 diag(exp(g_t)) + sum_{j <= t} (u_j b_j^T + v_j k_j^T) diag(exp(g_t - g_j))
    u_t - sum_{j < t} <a_t, b_j>_{t-1,j} u_j
        = S_0 (exp(g_{t-1}) * a_t) + sum_{j < t} <a_t, k_j>_{t-1,j} v_j

The second line is one unit lower triangular system for a whole chunk. Its right side is linear in
S_0, so all chunks are solved at once, with S_0 left open, and only products go from chunk to chunk.
No exponent is ever above 0: every pair of tokens and channel has an exponential of its own, C x C x
K numbers, which is why chunks are short. As all chunks are in hand at once, these are the most
memory that is needed: B x T x H x C x K numbers in fp32 at least, C = 16 times as many as the keys,
and for a backward pass three times that (they, and their products with k and with b).

Shape suffixes: B batch, T tokens, H heads, K key size, V value size, N chunks, C and J tokens of a
chunk (rows and columns).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.precision import accumulator
from archsearch_kernels.wkv7 import reference

CHUNK = 16
"""Tokens of a chunk; work and memory of the exponentials grow with it."""

NO_MEMORY = -1000.0
"""Log decay that is zero for certain, in fp64 too; keeps differences of sums finite."""


def wkv7(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    *,
    state_BHVK: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.wkv7.wkv7`."""
    tensors, T = (r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, a_BTHK, b_BTHK), r_BTHK.shape[1]
    if T == 1:  # a step of decoding is the definition as it stands
        return reference.wkv7(*tensors, state_BHVK=state_BHVK, keep_state=keep_state)
    compute, chunk = accumulator(r_BTHK.dtype), min(CHUNK, T)
    r, k, v, a, b = (
        _in_chunks(x.to(compute), chunk) for x in (r_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK)
    )
    # Sums of logarithms in fp64: their differences decide, and strong decays make the sums large.
    sum_BHNCK = _in_chunks(log_decay_BTHK.double().clamp(NO_MEMORY), chunk).cumsum(-2)
    rk, rb, ak, ab = _weights(r, k, a, b, sum_BHNCK)
    before_BHNCK = _shifted(sum_BHNCK).to(compute).exp()
    # The solver reads what lies below the diagonal and takes the diagonal for ones.
    solved = torch.linalg.solve_triangular(
        -ab, torch.cat((ak @ v, a * before_BHNCK), dim=-1), upper=False, unitriangular=True
    )
    u_BHNCV, open_BHNCK = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    # What a chunk makes of an empty memory, and the factors of what it makes of S_0.
    y_BHNCV = rk @ v + rb @ u_BHNCV
    read_BHNCK = r * sum_BHNCK.to(compute).exp() + rb @ open_BHNCK
    left_BHNCK = (sum_BHNCK[..., -1:, :] - sum_BHNCK).to(compute).exp()
    b, written_BHNVK = b * left_BHNCK, v.mT @ (k * left_BHNCK)
    written_BHNVK = written_BHNVK + u_BHNCV.mT @ b
    decay_BHN1K = sum_BHNCK[..., -1:, :].to(compute).exp()
    starts_BHNVK, memory_BHVK = _memories(
        written_BHNVK, decay_BHN1K, open_BHNCK.mT @ b, state_BHVK, keep_state
    )
    y_BHNCV = y_BHNCV + read_BHNCK @ starts_BHNVK.mT
    y_BTHV = y_BHNCV.flatten(2, 3)[:, :, :T].transpose(1, 2).to(r_BTHK.dtype)
    return y_BTHV, memory_BHVK


def _weights(
    r: Tensor, k: Tensor, a: Tensor, b: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What r and a of a token see of k and b of others, (B, H, N, C, J) each; 0 where they may not.

    r sees its own token and a does not: a of token t + 1 sees what r of token t does.
    """
    C = r.shape[-2]
    later_CJ1 = torch.ones(C, C, dtype=torch.bool, device=r.device).triu(1)[..., None]
    log_CJK = total[..., :, None, :] - total[..., None, :, :]
    decay_CJK = log_CJK.to(r.dtype).masked_fill(later_CJ1, -torch.inf).exp()
    next_a = F.pad(a[..., 1:, :], (0, 0, 0, 1))
    ra_C2K = torch.stack((r, next_a), dim=-2)
    rk, ak = (ra_C2K @ (decay_CJK * k[..., None, :, :]).mT).unbind(-2)
    rb, ab = (ra_C2K @ (decay_CJK * b[..., None, :, :]).mT).unbind(-2)
    return rk, rb, _shifted(ak), _shifted(ab)


def _memories(
    written_BHNVK: Tensor,
    decay_BHN1K: Tensor,
    moved_BHNKK: Tensor,
    state_BHVK: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The memory before each chunk, and the last one (None: not kept)."""
    N = written_BHNVK.shape[2]
    memory = torch.zeros_like(written_BHNVK[:, :, 0]) if state_BHVK is None else state_BHVK
    starts = []
    for n in range(N):
        starts.append(memory)
        if keep_state or n + 1 < N:
            kept_BHVK = memory * decay_BHN1K[:, :, n] + memory @ moved_BHNKK[:, :, n]
            memory = kept_BHVK + written_BHNVK[:, :, n]
    return torch.stack(starts, dim=2), memory if keep_state else None


def _shifted(x_CX: Tensor) -> Tensor:
    """Move every row of a chunk to the next token; the first token gets zeros."""
    return F.pad(x_CX[..., :-1, :], (0, 0, 1, 0))


def _in_chunks(x_BTHX: Tensor, chunk: int) -> Tensor:
    """Pad T to whole chunks and return (B, H, N, C, X). A token of zeros changes nothing."""
    padding = -x_BTHX.shape[1] % chunk
    padded = F.pad(x_BTHX, (0, 0, 0, 0, 0, padding)) if padding else x_BTHX
    x_BNCHX: Tensor = padded.unflatten(1, (-1, chunk))
    return x_BNCHX.permute(0, 3, 1, 2, 4)
