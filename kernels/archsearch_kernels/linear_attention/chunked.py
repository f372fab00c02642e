"""Causal linear attention in chunks: the quadratic form inside, the state between; linear in T.

Up to one chunk it is the quadratic form. Chunks are long because a Taylor map makes some ten times
as many features as a key has numbers: on a CPU, chunks of 64 cost up to twice the quadratic form
for sequences of up to about 512 tokens. Queries at places of their own are few, and not cut.

Shape suffixes: B batch, T tokens, H heads, K numbers before the expansion, V value size, F
features.
"""

from itertools import pairwise

import torch
from torch import Tensor

from archsearch_kernels.linear_attention import quadratic
from archsearch_kernels.linear_attention.feature_maps import Expansion

CHUNK = 256
"""Tokens of a chunk."""


def linear_attention(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    expansion: Expansion,
    log_decay_H: Tensor | None,
    exists_BT: Tensor | None,
    normalise: bool,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    keep_state: bool,
    at_BT: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `archsearch_kernels.linear_attention.linear_attention`."""
    if at_BT is not None:
        return quadratic.linear_attention(
            query_BTHK,
            key_BTHK,
            v_BTHV,
            expansion=expansion,
            log_decay_H=log_decay_H,
            exists_BT=exists_BT,
            normalise=normalise,
            memory_BHFV=memory_BHFV,
            normaliser_BHF=normaliser_BHF,
            keep_state=keep_state,
            at_BT=at_BT,
        )
    T, outputs = v_BTHV.shape[1], []
    for start, stop in pairwise((*range(0, T, CHUNK), T)):
        y_BTHV, memory_BHFV, normaliser_BHF = quadratic.linear_attention(
            query_BTHK[:, start:stop],
            key_BTHK[:, start:stop],
            v_BTHV[:, start:stop],
            expansion=expansion,
            log_decay_H=log_decay_H,
            exists_BT=None if exists_BT is None else exists_BT[:, start:stop],
            normalise=normalise,
            memory_BHFV=memory_BHFV,
            normaliser_BHF=normaliser_BHF,
            keep_state=keep_state or stop < T,
            at_BT=None,
        )
        outputs.append(y_BTHV)
    return torch.cat(outputs, dim=1), memory_BHFV, normaliser_BHF
