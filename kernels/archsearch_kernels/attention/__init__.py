"""Causal softmax attention with grouped keys and values (Vaswani et al., arXiv:1706.03762, eq. 1).

    y_i = sum_{j <= i} softmax_j(q_i . k_j / sqrt(K)) v_j

Query head h reads key-value head h // (H / G). No position encoding: rotate q and k before.

Shape suffixes: B batch, T queries, S keys, H query heads, G key-value heads, K key size, V value
size.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    *,
    at_BT: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Return y_BTHV in the dtype of q.

    Args:
        q_BTHK, k_BSGK, v_BSGV: one floating dtype; H is a multiple of G.
        at_BT: index among the keys of every query (int64, on the device), in any order: it sees
            keys 0 .. at, for a cache that is longer than what it holds, or for some queries only.
            None: S = T and query t stands at key t.
        backend: `reference` or `sdpa`.

    Raises:
        LookupError: no such backend.
    """
    y_BTHV: Tensor = FAMILY.load(backend)(q_BTHK, k_BSGK, v_BSGV, at_BT=at_BT)
    return y_BTHV


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: two query heads share a key-value head where the count is even."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, H, K = sizes.batch, sizes.tokens, sizes.heads, sizes.head_size
    G = H // 2 if H % 2 == 0 else H
    past = 5 if sizes.state else 0
    S = T + past + (3 if sizes.state else 0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q_BTHK": normal(B, T, H, K),
        "k_BSGK": normal(B, S, G, K),
        "v_BSGV": normal(B, S, G, K),
    }
    first_B1 = torch.arange(B)[:, None] % 3 + past - 2
    return Call(tensors, {"at_BT": first_B1 + torch.arange(T) if sizes.state else None})


FAMILY = Family(
    name="attention",
    op=attention,
    backends={
        "reference": "archsearch_kernels.attention.reference:attention",
        "sdpa": "archsearch_kernels.attention.sdpa:attention",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "sdpa"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
