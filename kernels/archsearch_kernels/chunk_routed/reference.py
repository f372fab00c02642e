"""Definition of chunk routing: decay, write, read and settle; look at what is kept.

One token after the other, the memories first and then the keys: given the routes, neither needs the
other. Shape suffixes: B batch, T tokens, N chunks, G groups, H memories, K and V sizes of their
keys and values, A softmax heads, I and U sizes of their keys and values, S slots, J keys.
"""

import torch
from torch import Tensor

from archsearch_kernels.chunk_routed.inputs import Inputs
from archsearch_kernels.chunk_routed.look import look
from archsearch_kernels.chunk_routed.routing import of_tokens


def chunk_routed(given: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `archsearch_kernels.chunk_routed.chunk_routed`."""
    z_BTAU = torch.stack([_look(given, t) for t in range(given.q.shape[1])], dim=1)
    return z_BTAU, *_read(given)


def _read(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is read from the memories, the chunk written, and the chunk spared."""
    written_BHVK, spared_BHVK, rules = given.written, given.spared, given.rules
    decay_BTH, outputs = given.log_decay.exp(), []
    for t in range(given.q.shape[1]):
        key_BHK, decay_BH11 = given.k[:, t], decay_BTH[:, t, :, None, None]
        written_BHVK = written_BHVK * decay_BH11
        value_BHV = given.v[:, t]
        if rules.delta:
            value_BHV = value_BHV - torch.einsum("bhvk,bhk->bhv", written_BHVK, key_BHK)
        value_BHV = given.beta[:, t, :, None] * value_BHV
        written_BHVK = written_BHVK + value_BHV[..., None] * key_BHK[..., None, :]
        if rules.decay_through:
            spared_BHVK = spared_BHVK * decay_BH11
        read_BHVK = spared_BHVK if rules.inside == "softmax" else written_BHVK
        outputs.append(torch.einsum("bhvk,bhk->bhv", read_BHVK, given.q[:, t]))
        written_BHVK, spared_BHVK = _settle(given, t, written_BHVK, spared_BHVK)
    return torch.stack(outputs, dim=1), written_BHVK, spared_BHVK


def _settle(
    given: Inputs, t: int, written_BHVK: Tensor, spared_BHVK: Tensor
) -> tuple[Tensor, Tensor]:
    """After the last token of a chunk, both memories become what its route says."""
    chunk_BT, complete_BN = given.chunk_of, given.complete
    mine_BN = chunk_BT[:, t, None] == torch.arange(complete_BN.shape[1], device=chunk_BT.device)
    ends_B = (mine_BN & complete_BN).any(1)
    if t + 1 < chunk_BT.shape[1]:
        ends_B = ends_B & (chunk_BT[:, t + 1] != chunk_BT[:, t])
    ends_B111 = ends_B[:, None, None, None]
    route_BG = of_tokens(given.to_memory, chunk_BT[:, t, None])[:, 0]
    heads = written_BHVK.shape[1] // route_BG.shape[1]
    s = route_BG.repeat_interleave(heads, 1)[..., None, None]
    settled_BHVK = s * written_BHVK + (1 - s) * spared_BHVK
    return (
        torch.where(ends_B111, settled_BHVK, written_BHVK),
        torch.where(ends_B111, settled_BHVK, spared_BHVK),
    )


def _look(given: Inputs, t: int) -> Tensor:
    """Return z_BAU of one token: softmax over its chunk so far and what earlier chunks keep."""
    current_B1 = given.chunk_of[:, t, None]
    own = 0.0 if given.rules.inside == "linear" else 1.0
    keys, values, factors = [], [], []
    if given.cache is not None:
        keys, values = [given.cache.keys], [given.cache.values]
        kept_BSG, open_BSG = given.cache.places(given.rules.chunk)
        # The open chunk is the one of the first token: the own one, or complete and routed by now.
        route_B1G = torch.where(current_B1[..., None] == 0, own, given.to_keys[:, :1])
        factors = [torch.where(open_BSG, route_B1G, kept_BSG.to(route_B1G.dtype))]
    if given.k_soft is not None:
        keys.append(given.k_soft[:, : t + 1])
        values.append(given.v_soft[:, : t + 1])
        chunk_BJ = given.chunk_of[:, : t + 1]
        route_BJG = of_tokens(given.to_keys, chunk_BJ)
        factors.append(torch.where((chunk_BJ == current_B1)[..., None], own, route_BJG))
    factor_BGJ = torch.cat(factors, dim=1).transpose(1, 2)
    heads = given.q_soft.shape[2] // factor_BGJ.shape[1]
    factor_BA1J = factor_BGJ.repeat_interleave(heads, 1)[:, :, None]
    q_B1AI = given.q_soft[:, t : t + 1]
    return look(q_B1AI, torch.cat(keys, dim=1), torch.cat(values, dim=1), factor_BA1J)[:, 0]
