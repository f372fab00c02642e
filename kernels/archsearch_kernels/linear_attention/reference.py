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
    at_BT: Tensor | None,
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
    for token, (key_BHF, v_BHV) in enumerate(
        zip(key_BTHF.unbind(1), v_BTHV.unbind(1), strict=True)
    ):
        if log_decay_H is not None:
            memory_BHFV = memory_BHFV * log_decay_H.exp()[:, None, None]
        memory_BHFV = memory_BHFV + key_BHF[..., None] * v_BHV[..., None, :]
        normaliser_BHF = normaliser_BHF + key_BHF
        asked_BTHF = query_BTHF if at_BT is not None else query_BTHF[:, token : token + 1]
        y_BTHV = torch.einsum("bthf,bhfv->bthv", asked_BTHF, memory_BHFV)
        if normalise:
            denominator_BTH = torch.einsum("bthf,bhf->bth", asked_BTHF, normaliser_BHF)
            y_BTHV = y_BTHV / (denominator_BTH + EPSILON)[..., None]
        here = at_BT is None or (at_BT == token)[..., None, None]
        outputs.append(y_BTHV * here)
    y_BTHV = torch.cat(outputs, dim=1) if at_BT is None else torch.stack(outputs).sum(0)
    if not keep_state:
        return y_BTHV, None, None
    return y_BTHV, memory_BHFV, normaliser_BHF if normalise else None
