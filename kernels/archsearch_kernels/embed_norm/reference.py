"""Definition of the embedding with its norm: torch's embedding, a mask, torch's norm.

Shape suffixes: N places, V vocabulary, D width.
"""

from torch import Tensor
from torch.nn import functional as F

from archsearch_kernels.dropout import drop
from archsearch_kernels.residual_norm.reference import norm


def embed_norm(
    tokens_N: Tensor,
    table_VD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    share: float,
    key: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `archsearch_kernels.embed_norm.embed_norm`."""
    r_ND = F.embedding(tokens_N, table_VD)
    if key is not None:
        r_ND = drop(r_ND, share, key)
    return r_ND, norm(r_ND, weight_D, bias_D)
