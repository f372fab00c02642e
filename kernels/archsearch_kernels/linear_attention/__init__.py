"""Causal linear attention with a feature map phi (BASED, arXiv:2402.18668, eq. 1-4).

    S_i = S_{i-1} + phi(k_i) v_i^T      z_i = z_{i-1} + phi(k_i)
    y_i = phi(q_i)^T S_i / (phi(q_i) . z_i + 1e-6)

The feature map `taylor` is the second-order expansion of the exponential: with t = q.k / sqrt(K),
phi(q).phi(k) = 1 + t + t^2/2. By symmetry it needs F = 1 + K + K(K+1)/2 features (153 at K = 16).

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes

EPSILON = 1e-6
"""Added to the denominator, which is at least 1/2 where a token has been seen."""


def feature_size(feature_map: str, key_size: int) -> int:
    """Return the number of features F that a map makes of `key_size` numbers.

    Raises:
        ValueError: no such feature map.
    """
    if feature_map != "taylor":
        raise ValueError(f"no feature map '{feature_map}'; there is: taylor")
    return 1 + key_size + key_size * (key_size + 1) // 2


def linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    feature_map: str = "taylor",
    memory_BHFV: Tensor | None = None,
    normaliser_BHF: Tensor | None = None,
    keep_state: bool = True,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y_BTHV in the dtype of q, and the memory and normaliser after the last token.

    Args:
        q_BTHK, k_BTHK, v_BTHV: one floating dtype.
        feature_map: `taylor`.
        memory_BHFV, normaliser_BHF: state to continue from, fp32 (fp64 for fp64 inputs); both or
            neither.
        keep_state: False leaves the two final states out (None), which saves their work.
        backend: `reference` or `quadratic`.

    Raises:
        LookupError: no such backend.
        ValueError: no such feature map.
    """
    feature_size(feature_map, q_BTHK.shape[-1])
    result: tuple[Tensor, Tensor | None, Tensor | None] = FAMILY.load(backend)(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        memory_BHFV=memory_BHFV,
        normaliser_BHF=normaliser_BHF,
        keep_state=keep_state,
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check; the state is one that five random tokens leave behind."""
    from archsearch_kernels.linear_attention.taylor import features

    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, H, K = sizes.batch, sizes.tokens, sizes.heads, sizes.head_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q_BTHK": normal(B, T, H, K),
        "k_BTHK": normal(B, T, H, K),
        "v_BTHV": normal(B, T, H, K + 3),
    }
    if sizes.state:
        past_BPHF = features(normal(B, 5, H, K))
        tensors["memory_BHFV"] = torch.einsum("bphf,bphv->bhfv", past_BPHF, normal(B, 5, H, K + 3))
        tensors["normaliser_BHF"] = past_BPHF.sum(1)
    return Call(tensors, {}, frozenset(("memory_BHFV", "normaliser_BHF")))


FAMILY = Family(
    name="linear_attention",
    op=linear_attention,
    backends={
        "reference": "archsearch_kernels.linear_attention.reference:linear_attention",
        "quadratic": "archsearch_kernels.linear_attention.quadratic:linear_attention",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "quadratic"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
