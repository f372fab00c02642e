"""Definition of Taylor linear attention: one token after the other, features spelled out.

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features.
"""

import torch
from torch import Tensor

from archsearch_kernels.linear_attention import EPSILON
from archsearch_kernels.linear_attention.taylor import features
from archsearch_kernels.precision import accumulator


def taylor_linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    exists_BT: Tensor | None,
    memory_BHFV: Tensor | None,
    normaliser_BHF: Tensor | None,
    keep_state: bool,
    at_BS: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `archsearch_kernels.taylor_linear_attention.taylor_linear_attention`."""
    compute = accumulator(q_BTHK.dtype)
    query_BSHF, key_BTHF = features(q_BTHK.to(compute)), features(k_BTHK.to(compute))
    if exists_BT is not None:
        key_BTHF = key_BTHF * exists_BT[..., None, None]
    memory = v_BTHV.new_zeros(()) if memory_BHFV is None else memory_BHFV
    normaliser = memory.new_zeros(()) if normaliser_BHF is None else normaliser_BHF
    B, S, H, _ = query_BSHF.shape
    y_BSHV = query_BSHF.new_zeros(B, S, H, v_BTHV.shape[-1])
    for t in range(v_BTHV.shape[1]):
        key_BHF, v_BHV = key_BTHF[:, t], v_BTHV[:, t].to(compute)
        memory = memory + key_BHF[..., None] * v_BHV[..., None, :]
        normaliser = normaliser + key_BHF
        is_here_BS = at_BS == t if at_BS is not None else torch.arange(S, device=v_BHV.device) == t
        query_BCHF = query_BSHF if at_BS is not None else query_BSHF[:, t : t + 1]
        numerator_BCHV = torch.einsum("bshf,bhfv->bshv", query_BCHF, memory)
        denominator_BCH = torch.einsum("bshf,bhf->bsh", query_BCHF, normaliser) + EPSILON
        read_BCHV = numerator_BCHV / denominator_BCH[..., None]
        y_BSHV = torch.where(is_here_BS[..., None, None], read_BCHV, y_BSHV)
    y_BSHV = y_BSHV.to(q_BTHK.dtype)
    return (y_BSHV, memory, normaliser) if keep_state else (y_BSHV, None, None)


def prefix_state(
    k_BTHK: Tensor, v_BTHV: Tensor, *, exists_BT: Tensor | None, length_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `archsearch_kernels.taylor_linear_attention.prefix_state`."""
    compute = accumulator(k_BTHK.dtype)
    key_BTHF = features(k_BTHK.to(compute))
    if exists_BT is not None:
        key_BTHF = key_BTHF * exists_BT[..., None, None]
    if length_B is not None:
        place_T = torch.arange(k_BTHK.shape[1], device=k_BTHK.device)
        key_BTHF = key_BTHF * (place_T < length_B[:, None])[..., None, None]
    return torch.einsum("bthf,bthv->bhfv", key_BTHF, v_BTHV.to(compute)), key_BTHF.sum(1)


def step(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, memory_BHFV: Tensor, normaliser_BHF: Tensor
) -> Tensor:
    """See `archsearch_kernels.taylor_linear_attention.step`."""
    y_B1HV, memory, normaliser = taylor_linear_attention(
        q_BHK[:, None],
        k_BHK[:, None],
        v_BHV[:, None],
        exists_BT=None,
        memory_BHFV=memory_BHFV,
        normaliser_BHF=normaliser_BHF,
        keep_state=True,
        at_BS=None,
    )
    assert memory is not None and normaliser is not None
    memory_BHFV.copy_(memory)
    normaliser_BHF.copy_(normaliser)
    return y_B1HV.squeeze(1)
