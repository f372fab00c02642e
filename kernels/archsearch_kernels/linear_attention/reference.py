"""Definition of causal linear attention: one token after the other, features spelled out.

Shape suffixes: B batch, T tokens, H heads, K numbers before the expansion, V value size, F
features.
"""

import torch
from torch import Tensor

from archsearch_kernels.linear_attention import EPSILON
from archsearch_kernels.linear_attention.feature_maps import Expansion, features_of


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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `archsearch_kernels.linear_attention.linear_attention`."""
    query_BTHF = expansion.features(query_BTHK)
    key_BTHF = features_of(expansion, key_BTHK, exists_BT)
    B, _, H, F = key_BTHF.shape
    if memory_BHFV is None:
        memory_BHFV = v_BTHV.new_zeros(B, H, F, v_BTHV.shape[-1])
    if normaliser_BHF is None:
        normaliser_BHF = v_BTHV.new_zeros(B, H, F)
    outputs = []
    for query_BHF, key_BHF, v_BHV in zip(
        query_BTHF.unbind(1), key_BTHF.unbind(1), v_BTHV.unbind(1), strict=True
    ):
        if log_decay_H is not None:
            memory_BHFV = memory_BHFV * log_decay_H.exp()[:, None, None]
        memory_BHFV = memory_BHFV + key_BHF[..., None] * v_BHV[..., None, :]
        y_BHV = torch.einsum("bhf,bhfv->bhv", query_BHF, memory_BHFV)
        if normalise:
            normaliser_BHF = normaliser_BHF + key_BHF
            denominator_BH = torch.einsum("bhf,bhf->bh", query_BHF, normaliser_BHF)
            y_BHV = y_BHV / (denominator_BH + EPSILON)[..., None]
        outputs.append(y_BHV)
    y_BTHV = torch.stack(outputs, dim=1)
    if not keep_state:
        return y_BTHV, None, None
    return y_BTHV, memory_BHFV, normaliser_BHF if normalise else None
