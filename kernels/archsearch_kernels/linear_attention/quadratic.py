"""Causal linear attention through the T x T matrix of similarities: fast for short sequences.

Features are only made to read a given state and to leave one behind.

Shape suffixes: B batch, T queries, S keys (S = T), H heads, K query and key size, V value size,
F features.
"""

from torch import Tensor

from archsearch_kernels.linear_attention import EPSILON
from archsearch_kernels.linear_attention.taylor import features, similarity
from archsearch_kernels.precision import accumulator


def linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `archsearch_kernels.linear_attention.linear_attention`."""
    compute = accumulator(q_BTHK.dtype)
    q_BHTK, k_BHSK, v_BHSV = (x.to(compute).transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHV))
    score_BHTS = (q_BHTK * q_BHTK.shape[-1] ** -0.5) @ k_BHSK.mT
    weight_BHTS = similarity(score_BHTS).tril()
    numerator_BHTV = weight_BHTS @ v_BHSV
    denominator_BHT = weight_BHTS.sum(-1)
    if memory_BHFV is not None and normaliser_BHF is not None:
        query_BHTF = features(q_BHTK)
        numerator_BHTV = numerator_BHTV + query_BHTF @ memory_BHFV
        denominator_BHT = denominator_BHT + (query_BHTF @ normaliser_BHF[..., None]).squeeze(-1)
    y_BHTV = numerator_BHTV / (denominator_BHT + EPSILON)[..., None]
    y_BTHV = y_BHTV.transpose(1, 2).to(q_BTHK.dtype)
    if not keep_state:
        return y_BTHV, None, None
    key_BHSF = features(k_BHSK)
    new_memory_BHFV, new_normaliser_BHF = key_BHSF.mT @ v_BHSV, key_BHSF.sum(-2)
    if memory_BHFV is not None and normaliser_BHF is not None:
        new_memory_BHFV = memory_BHFV + new_memory_BHFV
        new_normaliser_BHF = normaliser_BHF + new_normaliser_BHF
    return y_BTHV, new_memory_BHFV, new_normaliser_BHF
