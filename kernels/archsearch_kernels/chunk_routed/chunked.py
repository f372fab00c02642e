"""Chunk routing without a loop over tokens: all scores at once, memories chunk by chunk.

Inside a chunk the memory is that of the gated delta rule in WY form (arXiv:2412.06464, section 3.3;
arXiv:2406.06484). With g_t the sum of log(alpha) of the chunk up to t, D_tj = exp(g_t - g_j) for
j <= t, and W_0 the memory before the chunk,

    W_t = exp(g_t) W_0 + sum_{j <= t} D_tj u_j k_j^T
    u_t + beta_t sum_{j < t} D_tj (k_t . k_j) u_j = beta_t (v_t - exp(g_t) W_0 k_t)

The triangular system is solved for all chunks together, once for beta v and once for the factor of
W_0, so that only two products for each chunk wait for the chunk before. Without `delta`, u_t is
beta_t v_t.

Shape suffixes: B batch, T tokens, N chunks, C and R tokens of a chunk (rows and columns), G groups,
H memories, K and V sizes of their keys and values, A softmax heads, J keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch_kernels.chunk_routed import reference
from archsearch_kernels.chunk_routed.inputs import Inputs
from archsearch_kernels.chunk_routed.look import look
from archsearch_kernels.chunk_routed.routing import of_tokens

NO_MEMORY = -1000.0
"""Log decay that is zero for certain, in fp64 too; keeps differences of sums finite."""


def chunk_routed(given: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `archsearch_kernels.chunk_routed.chunk_routed`."""
    if given.q.shape[1] == 1:  # one step of the definition; chunks of one would be waste
        return reference.chunk_routed(given)
    return _look(given), *_read(given)


def _look(given: Inputs) -> Tensor:
    """Return z_BTAU through the scores of all queries and keys."""
    assert given.k_soft is not None, "only a lone token has its key in the cache"
    chunk_BT, rules = given.chunk_of, given.rules
    own = 0.0 if rules.inside == "linear" else 1.0
    time_T = torch.arange(chunk_BT.shape[1], device=chunk_BT.device)
    route_BG1J = of_tokens(given.to_keys, chunk_BT).transpose(1, 2)[:, :, None]
    query, key = chunk_BT[:, None, :, None], chunk_BT[:, None, None]
    inside = own * ((query == key) & (time_T <= time_T[:, None])).to(route_BG1J.dtype)
    factor_BGTJ = torch.where(query > key, route_BG1J, inside)
    keys, values = given.k_soft, given.v_soft
    if given.cache is not None:
        kept, opened = (x.transpose(1, 2)[:, :, None] for x in given.cache.places(rules.chunk))
        route_BGT1 = torch.where(query == 0, own, given.to_keys[:, 0, :, None, None])
        past_BGTS = torch.where(opened, route_BGT1, kept.to(route_BGT1.dtype))
        factor_BGTJ = torch.cat((past_BGTS, factor_BGTJ), dim=-1)
        keys = torch.cat((given.cache.keys, keys), dim=1)
        values = torch.cat((given.cache.values, values), dim=1)
    heads = given.q_soft.shape[2] // factor_BGTJ.shape[1]
    return look(given.q_soft, keys, values, factor_BGTJ.repeat_interleave(heads, 1))


def _read(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is read from the memories, the chunk written, and the chunk spared."""
    q, k, v, beta = (
        _in_chunks(x, given) for x in (given.q, given.k, given.v, given.beta[..., None])
    )
    # Sums of logarithms in fp64: their differences decide, and strong decays make the sums large.
    log_BTH1 = given.log_decay.double().clamp(NO_MEMORY)[..., None]
    sum_BHNC1 = _in_chunks(log_BTH1, given).cumsum(-2)
    decayed, remaining = sum_BHNC1.to(q).exp(), (sum_BHNC1[..., -1:, :] - sum_BHNC1).to(q).exp()
    C = q.shape[-2]
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    decay_BHNCR = (sum_BHNC1 - sum_BHNC1.mT).to(q).masked_fill(later, -torch.inf).exp()
    u, against = beta * v, None
    if given.rules.delta:
        system_BHNCR = (beta * k) @ k.mT * decay_BHNCR
        solved = torch.linalg.solve_triangular(
            system_BHNCR, torch.cat((u, beta * k * decayed), -1), upper=False, unitriangular=True
        )
        u, against = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    u, starts, written, spared = _chain(given, u, against, k * remaining, decayed[..., -1:, :])
    if given.rules.inside != "softmax":
        y = (q * decayed) @ starts.mT + (q @ k.mT * decay_BHNCR) @ u
    elif given.rules.decay_through:
        y = (q * decayed) @ starts.mT
    else:
        y = q @ starts.mT
    return _in_a_row(y, given), written, spared


def _chain(
    given: Inputs, u: Tensor, against: Tensor | None, k: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Go from chunk to chunk: what is written, the memory read at each start, the last two.

    `k` are keys decayed to the end of their chunk, and `decay` is that of a whole chunk.
    """
    written, spared, rules = given.written, given.spared, given.rules
    heads = written.shape[1] // given.to_memory.shape[2]
    s_BHN = given.to_memory.transpose(1, 2).repeat_interleave(heads, 1)
    writes, starts = [], []
    for n in range(u.shape[2]):
        starts.append(spared if rules.inside == "softmax" else written)
        u_BHCV = u[:, :, n]
        if against is not None:
            u_BHCV = u_BHCV - against[:, :, n] @ written.mT
        writes.append(u_BHCV)
        written = written * decay[:, :, n] + u_BHCV.mT @ k[:, :, n]
        if rules.decay_through:
            spared = spared * decay[:, :, n]
        s, ends = s_BHN[:, :, n, None, None], given.complete[:, n, None, None, None]
        settled = s * written + (1 - s) * spared
        written, spared = (torch.where(ends, settled, x) for x in (written, spared))
    return torch.stack(writes, 2), torch.stack(starts, 2), written, spared


def _in_chunks(x_BTHX: Tensor, given: Inputs) -> Tensor:
    """Return (B, H, N, C, X), zeros where there is no token. A token of zeros changes nothing."""
    T, H, X = x_BTHX.shape[1:]
    count, chunk = given.complete.shape[1], given.rules.chunk
    if given.offset is None:
        chunk = min(chunk, T)
        padded = F.pad(x_BTHX, (0, 0, 0, 0, 0, count * chunk - T))
    else:
        token_BL = torch.arange(count * chunk, device=x_BTHX.device) - given.offset[:, None]
        exists = ((token_BL >= 0) & (token_BL < T))[..., None, None]
        index = token_BL.clamp(0, T - 1)[..., None, None].expand(-1, -1, H, X)
        padded = torch.where(exists, x_BTHX.gather(1, index), 0.0)
    x_BNCHX: Tensor = padded.unflatten(1, (count, chunk))
    return x_BNCHX.permute(0, 3, 1, 2, 4)


def _in_a_row(y_BHNCV: Tensor, given: Inputs) -> Tensor:
    """Undo `_in_chunks`: return (B, T, H, V)."""
    T = given.q.shape[1]
    y_BLHV = y_BHNCV.permute(0, 2, 3, 1, 4).flatten(1, 2)
    if given.offset is None:
        return y_BLHV[:, :T]
    index_BT = given.offset[:, None] + torch.arange(T, device=y_BLHV.device)
    return y_BLHV.gather(1, index_BT[..., None, None].expand(-1, -1, *y_BLHV.shape[2:]))
