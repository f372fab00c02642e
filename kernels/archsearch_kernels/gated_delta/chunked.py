"""The gated delta rule in chunks (WY form; arXiv:2412.06464, section 3.3; arXiv:2406.06484).

Write u_t = beta_t (v_t - alpha_t S_{t-1} k_t), so that S_t = alpha_t S_{t-1} + u_t k_t^T. Inside a
chunk, with g_t the sum of log(alpha) up to and including t and D_tj = exp(g_t - g_j),

    S_t = exp(g_t) S_0 + sum_{j <= t} D_tj u_j k_j^T
    u_t + beta_t sum_{j < t} D_tj (k_t . k_j) u_j = beta_t (v_t - exp(g_t) S_0 k_t)

The second line is one unit lower triangular system for a whole chunk. It is solved by forward
substitution: a series of powers would lose all digits where keys repeat and beta is near 1.

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
    # Sums of logarithms in fp64: their differences decide, and strong decays make the sums large.
    log_BHNC1 = _in_chunks(log_decay_BTH.double().clamp(NO_MEMORY)[..., None], chunk)
    parts = [
        _in_chunks(x.to(compute), chunk) for x in (q_BTHK, k_BTHK, v_BTHV, beta_BTH[..., None])
    ]
    memory_BHVK, outputs = state_BHVK, []
    chunks = list(zip(*(x.unbind(2) for x in (*parts, log_BHNC1)), strict=True))
    for n, (q_BHCK, k_BHCK, v_BHCV, beta_BHC1, log_BHC1) in enumerate(chunks):
        y_BHCV, memory_BHVK = _one_chunk(
            q_BHCK,
            k_BHCK,
            v_BHCV,
            beta_BHC1,
            log_BHC1.cumsum(-2),
            memory_BHVK,
            keep_state or n + 1 < len(chunks),
        )
        outputs.append(y_BHCV)
    y_BTHV = torch.cat(outputs, dim=2)[:, :, :T].transpose(1, 2).to(q_BTHK.dtype)
    return y_BTHV, memory_BHVK


def _one_chunk(
    q_BHCK: Tensor,
    k_BHCK: Tensor,
    v_BHCV: Tensor,
    beta_BHC1: Tensor,
    sum_BHC1: Tensor,
    memory_BHVK: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of one chunk and the memory after it. `sum_BHC1` is g, in fp64."""
    C, compute = q_BHCK.shape[2], q_BHCK.dtype
    later = torch.ones(C, C, dtype=torch.bool, device=q_BHCK.device).triu(1)
    decay_BHCJ = (sum_BHC1 - sum_BHC1.mT).to(compute).masked_fill(later, -torch.inf).exp()
    decayed_BHC1 = sum_BHC1.to(compute).exp()
    if memory_BHVK is not None:
        v_BHCV = v_BHCV - (k_BHCK * decayed_BHC1) @ memory_BHVK.mT
    # The solver reads what lies below the diagonal and takes the diagonal for ones.
    system_BHCJ = (beta_BHC1 * k_BHCK) @ k_BHCK.mT * decay_BHCJ
    u_BHCV = torch.linalg.solve_triangular(
        system_BHCJ, beta_BHC1 * v_BHCV, upper=False, unitriangular=True
    )
    y_BHCV = (q_BHCK @ k_BHCK.mT * decay_BHCJ) @ u_BHCV
    if memory_BHVK is not None:
        y_BHCV = y_BHCV + (q_BHCK * decayed_BHC1) @ memory_BHVK.mT
    if not keep_state:
        return y_BHCV, None
    remaining_BHC1 = (sum_BHC1[:, :, -1:] - sum_BHC1).to(compute).exp()
    added_BHVK = u_BHCV.mT @ (k_BHCK * remaining_BHC1)
    if memory_BHVK is not None:
        added_BHVK = added_BHVK + memory_BHVK * decayed_BHC1[:, :, -1:]
    return y_BHCV, added_BHVK


def _in_chunks(x_BTHX: Tensor, chunk: int) -> Tensor:
    """Pad T to whole chunks and return (B, H, N, C, X). A token of zeros changes nothing."""
    padding = -x_BTHX.shape[1] % chunk
    padded = F.pad(x_BTHX, (0, 0, 0, 0, 0, padding)) if padding else x_BTHX
    x_BNCHX: Tensor = padded.unflatten(1, (-1, chunk))
    return x_BNCHX.permute(0, 3, 1, 2, 4)
