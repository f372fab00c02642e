"""Gated linear attention through the T x T matrix of what each token reads of each before it.

With g_t the sum of log(a) up to and including t,

    y_t = sum_{j <= t} (sum_c q_tc k_jc exp(g_tc - g_jc)) v_j + S_0^T (exp(g_t) * q_t)

One decay for a head leaves the matrix of q.k, weighted by exp(g_t - g_j). A decay for each channel
needs the exponential of every pair and channel, T x T x K numbers: for short sequences. No exponent
is ever above 0, so that nothing overflows however strong the decays are. The sums of logarithms are
in fp64: their differences decide, and strong decays make the sums large.

Shape suffixes: B batch, T tokens, J tokens read, H heads, G heads of queries and keys (H or 1), K
key size, V value size, R decays of a head (K or 1); in `weights`, `read` and `written` the leading
dimensions are any.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator

NO_MEMORY = -1000.0
"""Log decay that is zero for certain, in fp64 too; keeps differences of sums finite."""


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
    compute = accumulator(q_BTGK.dtype)
    q_BGTK, k_BGTK, v_BHTV = (x.to(compute).transpose(1, 2) for x in (q_BTGK, k_BTGK, v_BTHV))
    sum_BHTR = log_decay_BTHR.double().clamp(NO_MEMORY).transpose(1, 2).cumsum(-2)
    y_BHTV = weights(q_BGTK, k_BGTK, sum_BHTR) @ v_BHTV
    if state_BHKV is not None:
        y_BHTV = y_BHTV + read(q_BGTK, sum_BHTR, state_BHKV)
    y_BTHV = y_BHTV.transpose(1, 2).to(q_BTGK.dtype)
    if not keep_state:
        return y_BTHV, None
    memory_BHKV = written(k_BGTK, v_BHTV, sum_BHTR)
    if state_BHKV is not None:
        memory_BHKV = memory_BHKV + sum_BHTR[..., -1:, :].mT.to(compute).exp() * state_BHKV
    return y_BTHV, memory_BHKV


def weights(q_TK: Tensor, k_JK: Tensor, sum_TR: Tensor) -> Tensor:
    """What every token reads of itself and of those before it, (T, J); 0 for later ones."""
    T, R = sum_TR.shape[-2:]
    later_TJ1 = torch.ones(T, T, dtype=torch.bool, device=q_TK.device).triu(1)[..., None]
    log_TJR = sum_TR[..., :, None, :] - sum_TR[..., None, :, :]
    decay_TJR = log_TJR.to(q_TK.dtype).masked_fill(later_TJ1, -torch.inf).exp()
    if R == 1:
        return (q_TK @ k_JK.mT) * decay_TJR.squeeze(-1)
    return ((decay_TJR * k_JK[..., None, :, :]) @ q_TK[..., None]).squeeze(-1)


def read(q_TK: Tensor, sum_TR: Tensor, memory_KV: Tensor) -> Tensor:
    """What tokens read, (T, V), of a memory that ends where their sums of logarithms begin."""
    return (q_TK * sum_TR.to(q_TK.dtype).exp()) @ memory_KV


def written(k_TK: Tensor, v_TV: Tensor, sum_TR: Tensor) -> Tensor:
    """What tokens leave in the memory, (K, V), after the last of them."""
    left_TR = (sum_TR[..., -1:, :] - sum_TR).to(k_TK.dtype).exp()
    return (k_TK * left_TR).mT @ v_TV
