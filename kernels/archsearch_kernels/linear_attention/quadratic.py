"""Causal linear attention through the T x T matrix of similarities: fast for short sequences.

Features are only made to read a given state and to leave one behind.

Shape suffixes: B batch, T queries, S keys (S = T), H heads, K numbers before the expansion, V value
size, F features.
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
    query_BHTK, v_BHSV = query_BTHK.transpose(1, 2), v_BTHV.transpose(1, 2)
    weight_BHTS = expansion.similarity(query_BHTK, key_BTHK.transpose(1, 2))
    age_S = torch.arange(v_BTHV.shape[1], device=v_BTHV.device, dtype=v_BTHV.dtype)
    if at_BT is None:
        weight_BHTS, query_T1 = weight_BHTS.tril(), age_S[:, None]
    else:
        query_T1 = at_BT[:, None, :, None].to(age_S.dtype)
        weight_BHTS = weight_BHTS * (age_S <= query_T1)
    if exists_BT is not None:
        weight_BHTS = weight_BHTS * exists_BT[:, None, None, :]
    y_BHTV = _decayed(weight_BHTS, query_T1 - age_S, log_decay_H) @ v_BHSV
    query_BHTF = None if memory_BHFV is None else expansion.features(query_BHTK)
    if query_BHTF is not None and memory_BHFV is not None:
        y_BHTV = y_BHTV + _decayed(query_BHTF, query_T1 + 1, log_decay_H) @ memory_BHFV
    if normalise:
        denominator_BHT = weight_BHTS.sum(-1)
        if query_BHTF is not None and normaliser_BHF is not None:
            denominator_BHT = denominator_BHT + (query_BHTF @ normaliser_BHF[..., None]).squeeze(-1)
        y_BHTV = y_BHTV / (denominator_BHT + EPSILON)[..., None]
    y_BTHV = y_BHTV.transpose(1, 2)
    if not keep_state:
        return y_BTHV, None, None
    key_BHSF = features_of(expansion, key_BTHK, exists_BT).transpose(1, 2)
    new_memory_BHFV = _decayed(key_BHSF, age_S.flip(0)[:, None], log_decay_H).mT @ v_BHSV
    if memory_BHFV is not None:
        new_memory_BHFV = new_memory_BHFV + _decayed(memory_BHFV, age_S[-1:] + 1, log_decay_H)
    if not normalise:
        return y_BTHV, new_memory_BHFV, None
    new_normaliser_BHF = key_BHSF.sum(-2)
    if normaliser_BHF is not None:
        new_normaliser_BHF = normaliser_BHF + new_normaliser_BHF
    return y_BTHV, new_memory_BHFV, new_normaliser_BHF


def _decayed(x_BHIJ: Tensor, age_IJ: Tensor, log_decay_H: Tensor | None) -> Tensor:
    """What is left of numbers after `age_IJ` tokens; those of a negative age are 0 already."""
    if log_decay_H is None:
        return x_BHIJ
    return x_BHIJ * (log_decay_H[:, None, None] * age_IJ.clamp(min=0)).exp()
