"""Definition of causal linear attention: one token after the other, features spelled out.

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features.
"""

import torch
from torch import Tensor

from archsearch_kernels.linear_attention import EPSILON
from archsearch_kernels.linear_attention.taylor import features
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
    query_BTHF, key_BTHF = features(q_BTHK.to(compute)), features(k_BTHK.to(compute))
    value_BTHV = v_BTHV.to(compute)
    B, _, H, F = key_BTHF.shape
    if memory_BHFV is None:
        memory_BHFV = value_BTHV.new_zeros(B, H, F, value_BTHV.shape[-1])
    if normaliser_BHF is None:
        normaliser_BHF = value_BTHV.new_zeros(B, H, F)
    outputs = []
    for query_BHF, key_BHF, value_BHV in zip(
        query_BTHF.unbind(1), key_BTHF.unbind(1), value_BTHV.unbind(1), strict=True
    ):
        memory_BHFV = memory_BHFV + key_BHF[..., None] * value_BHV[..., None, :]
        normaliser_BHF = normaliser_BHF + key_BHF
        numerator_BHV = torch.einsum("bhf,bhfv->bhv", query_BHF, memory_BHFV)
        denominator_BH = torch.einsum("bhf,bhf->bh", query_BHF, normaliser_BHF)
        outputs.append(numerator_BHV / (denominator_BH + EPSILON)[..., None])
    y_BTHV = torch.stack(outputs, dim=1).to(q_BTHK.dtype)
    return (y_BTHV, memory_BHFV, normaliser_BHF) if keep_state else (y_BTHV, None, None)
