"""The gated delta rule in chunks (WY form; arXiv:2412.06464, section 3.3; arXiv:2406.06484).

Write u_t = beta_t (v_t - alpha_t S_{t-1} k_t), so that S_t = alpha_t S_{t-1} + u_t k_t^T. Inside a
chunk, with g_t the sum of log(alpha) up to and including t and D_tj = exp(g_t - g_j),

    S_t = exp(g_t) S_0 + sum_{j <= t} D_tj u_j k_j^T
    u_t + beta_t sum_{j < t} D_tj (k_t . k_j) u_j = beta_t v_t - beta_t exp(g_t) S_0 k_t

The second line is one unit lower triangular system for a whole chunk. It is solved by forward
substitution: a series of powers would lose all digits where keys repeat and beta is near 1. Chunks
then follow one another, each a few matrix products.

Shape suffixes: B batch, T tokens, H heads, K key size, V value size, N chunks, C and J tokens of a
chunk (rows and columns).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.precision import accumulator

CHUNK = 32
"""Tokens of a chunk."""

NO_MEMORY = -1000.0
"""Log decay that is zero for certain, in fp64 too; keeps differences of sums finite."""


def gated_delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    state_BHVK: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.gated_delta.gated_delta`."""
    compute = accumulator(q_BTHK.dtype)
    T = q_BTHK.shape[1]
    chunk = min(CHUNK, T)
    q, k, v, beta = (
        _in_chunks(x.to(compute), chunk) for x in (q_BTHK, k_BTHK, v_BTHV, beta_BTH[..., None])
    )
    # Sums of logarithms in fp64: their differences decide, and strong decays make the sums large.
    sum_BHNC = _in_chunks(log_decay_BTH.double().clamp(NO_MEMORY)[..., None], chunk)
    sum_BHNC = sum_BHNC.squeeze(-1).cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    difference = (sum_BHNC[..., :, None] - sum_BHNC[..., None, :]).to(compute)
    decay_BHNCJ = difference.masked_fill(later, -torch.inf).exp()
    decayed_BHNC1 = sum_BHNC.to(compute).exp()[..., None]

    # The solver reads what lies below the diagonal and takes the diagonal for ones.
    corrected_BHNCK = beta * k
    system_BHNCJ = (corrected_BHNCK @ k.mT) * decay_BHNCJ
    right = torch.cat((beta * v, corrected_BHNCK * decayed_BHNC1), dim=-1)
    solved = torch.linalg.solve_triangular(system_BHNCJ, right, upper=False, unitriangular=True)
    written_BHNCV, erased_BHNCK = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    weight_BHNCJ = (q @ k.mT) * decay_BHNCJ

    query_BHNCK = q * decayed_BHNC1
    remaining = (sum_BHNC[..., -1:] - sum_BHNC).to(compute).exp()[..., None]
    key_BHNCK = k * remaining

    memory_BHVK, outputs = state_BHVK, []
    chunks = q.shape[2]
    for n in range(chunks):
        u_BHCV = written_BHNCV[:, :, n]
        if memory_BHVK is not None:
            u_BHCV = u_BHCV - erased_BHNCK[:, :, n] @ memory_BHVK.mT
        y_BHCV = weight_BHNCJ[:, :, n] @ u_BHCV
        if memory_BHVK is not None:
            y_BHCV = y_BHCV + query_BHNCK[:, :, n] @ memory_BHVK.mT
        outputs.append(y_BHCV)
        if keep_state or n + 1 < chunks:
            added_BHVK = u_BHCV.mT @ key_BHNCK[:, :, n]
            if memory_BHVK is not None:
                added_BHVK = added_BHVK + memory_BHVK * decayed_BHNC1[:, :, n, -1:]
            memory_BHVK = added_BHVK
    y_BTHV = torch.cat(outputs, dim=2)[:, :, :T].transpose(1, 2).to(q_BTHK.dtype)
    return y_BTHV, memory_BHVK if keep_state else None


def _in_chunks(x_BTHX: Tensor, chunk: int) -> Tensor:
    """Pad T to whole chunks and return (B, H, N, C, X). A token of zeros changes nothing."""
    padding = -x_BTHX.shape[1] % chunk
    padded = F.pad(x_BTHX, (0, 0, 0, 0, 0, padding)) if padding else x_BTHX
    x_BNCHX: Tensor = padded.unflatten(1, (-1, chunk))
    return x_BNCHX.permute(0, 3, 1, 2, 4)
