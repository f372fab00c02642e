"""Causal softmax attention over the last `window` tokens, the current one included.

    y_i = sum_{i - window < j <= i} softmax_j(q_i . k_j / sqrt(K)) v_j

A window of w means exactly w visible tokens. Peers mean w + 1 or w / 2 + 1 by the same word.

The backend `triton` reads the blocks of keys that a window meets and stores no scores (after Dao et
al., arXiv:2205.14135): its memory is that of its inputs and outputs. It rounds weights to the dtype
of the values before they are summed, as fused attention does.

Shape suffixes: B batch, T queries, S keys (S - T of them older than the first query), H query
heads, G key-value heads, K key size, V value size.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes

WIDEST_TRITON = 256
"""Largest head of the backend `triton`."""


def sliding_window(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    *,
    window: int,
    exists_BS: Tensor | None = None,
    at_BT: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Return y_BTHV in the dtype of q.

    Args:
        q_BTHK, k_BSGK, v_BSGV: one floating dtype; H is a multiple of G. Query t stands at key
            S - T + t.
        window: how many keys a query sees at most, its own included; at least 1.
        exists_BS: False for keys that are unused room of a buffer. None: all exist. A query's own
            key always exists.
        at_BT: index among the keys of every query, in any order. None: S - T + t. With it the work
            is that of all keys for every query, whatever the backend.
        backend: `reference`, `masked`, `blocked` or, on CUDA, `triton`, which takes no fp64 and
            heads of up to 256 numbers.

    Raises:
        LookupError: no such backend.
        ValueError: a dtype or a head size that the backend does not take.
    """
    y_BTHV: Tensor = FAMILY.load(backend)(
        q_BTHK, k_BSGK, v_BSGV, window=window, exists_BS=exists_BS, at_BT=at_BT
    )
    return y_BTHV


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: a window of 5, and with state a buffer that is partly empty."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, H, K = sizes.batch, sizes.tokens, sizes.heads, sizes.head_size
    window = 5
    S = T + window if sizes.state else T
    G = H // 2 if H % 2 == 0 else H

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q_BTHK": normal(B, T, H, K),
        "k_BSGK": normal(B, S, G, K),
        "v_BSGV": normal(B, S, G, K),
    }
    empty_B = torch.arange(B) % (window + 1)
    exists_BS = torch.arange(S) >= empty_B[:, None] if sizes.state else None
    return Call(tensors, {"window": window, "exists_BS": exists_BS})


_HALF = (torch.bfloat16, torch.float16)

FAMILY = Family(
    name="sliding_window",
    op=sliding_window,
    backends={
        "reference": "archsearch_kernels.sliding_window.reference:sliding_window",
        "masked": "archsearch_kernels.sliding_window.masked:sliding_window",
        "blocked": "archsearch_kernels.sliding_window.blocked:sliding_window",
        "triton": "archsearch_kernels.sliding_window.triton:sliding_window",
    },
    make_inputs=make_inputs,
    auto={
        **{("cpu", dtype): "blocked" for dtype in (*_HALF, torch.float32)},
        **{("cuda", dtype): "triton" for dtype in _HALF},
        ("cuda", torch.float32): "masked",
    },
    instead={"triton": "masked"},
    only_on={"triton": "cuda"},
)
