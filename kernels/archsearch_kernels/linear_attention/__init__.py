"""Causal linear attention with a feature map phi (BASED, arXiv:2402.18668, eq. 1-4).

    S_i = gamma S_{i-1} + phi(k_i) v_i^T      z_i = z_{i-1} + phi(k_i)
    y_i = phi(q_i)^T S_i / (phi(q_i) . z_i + 1e-6)

Without a decay gamma is 1. With one it is a number for each head and forgets in the memory S alone:
BASED's normaliser z counts every token in full. Without the normaliser y_i = phi(q_i)^T S_i.

The maps of K numbers, by name:

    taylor       phi(q).phi(k) = 1 + t + t^2/2 for t = q.k / sqrt(K), in 1 + K + K(K+1)/2 features
    taylor_full  the same in the 1 + K + K^2 features of the authors' code, each cross term twice
    elu          1 + ELU(x): x + 1 above 0, exp(x) below (arXiv:2006.16236)
    relu         max(x, 0) (arXiv:2103.13076)
    performer    exp(w_p.u - |u|^2/2) / sqrt(P) for u = x / K^(1/4) and P random rows w_p: on
                 average phi(q).phi(k) = exp(q.k / sqrt(K)) (FAVOR+, arXiv:2009.14794)
    cosformer    max(x, 0) times cos(a) and sin(a), a = (pi/2) i / M at position i of M:
                 phi(q).phi(k) falls with the cosine of the distance (arXiv:2202.08791)

phi(q).phi(k) is never negative, so that the denominator is at least 1e-6. It is no more than that
where `relu` or `cosformer` find no number above 0 in both the query and any key: y is 0 there.

`prefix_state` is the state that tokens leave which read each other, to begin with (just read twice,
arXiv:2407.05483).

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features, P random
features.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes
from archsearch_kernels.linear_attention.feature_maps import MAPS, expansion_of, features_of, mapped
from archsearch_kernels.precision import accumulator

EPSILON = 1e-6
"""Added to the denominator. A Taylor map makes that at least 1/2 where a token has been seen."""


def feature_size(feature_map: str, key_size: int, random_features: int = 0) -> int:
    """Return the number of features F that a map makes of `key_size` numbers.

    Args:
        random_features: rows of the projection of `performer`.

    Raises:
        ValueError: no such feature map.
    """
    if feature_map not in MAPS:
        raise ValueError(f"no feature map '{feature_map}'; there are: {', '.join(MAPS)}")
    return MAPS[feature_map].size(key_size, random_features)


def linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    feature_map: str = "taylor",
    projection_PK: Tensor | None = None,
    position_BT: Tensor | None = None,
    max_len: int | None = None,
    log_decay_H: Tensor | None = None,
    exists_BT: Tensor | None = None,
    normalise: bool = True,
    memory_BHFV: Tensor | None = None,
    normaliser_BHF: Tensor | None = None,
    keep_state: bool = True,
    at_BT: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y_BTHV in the dtype of q, and the memory and normaliser after the last token.

    Args:
        q_BTHK, k_BTHK, v_BTHV: one floating dtype.
        feature_map: a name of `MAPS`.
        projection_PK: random rows of `performer`, which needs them.
        position_BT: positions from 0 for `cosformer`, which needs them; one row may serve all.
        max_len: positions that `cosformer` tells apart; later ones count as the last of them.
        log_decay_H: log(gamma) <= 0 of each head, finite; None: nothing is forgotten.
        exists_BT: False where a token is padding: it leaves no trace in any state or output but its
            own, and its own is 0 while nothing has been read.
        normalise: False leaves the denominator out, and the normaliser (None).
        memory_BHFV, normaliser_BHF: state to continue from, fp32 (fp64 for fp64 inputs).
        at_BT: index among the keys of every query, in any order, for queries that are fewer than
            the keys; `position_BT` is that of the keys. None: query t stands at key t.
        keep_state: False leaves the two final states out (None), which saves their work.
        backend: `reference`, `quadratic`, `chunked`, or, on CUDA, `triton`: the kernels of
            `taylor_linear_attention`, for the map `taylor` with its normaliser and no decay.

    Raises:
        LookupError: no such backend.
        ValueError: no such feature map, or it lacks what it needs, or a backend without programs
            for it.
    """
    feature_size(feature_map, q_BTHK.shape[-1])
    if backend == "triton":
        _require_taylor(feature_map, log_decay_H, normalise)
        result: tuple[Tensor, Tensor | None, Tensor | None] = FAMILY.load(backend)(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            exists_BT=exists_BT,
            memory_BHFV=memory_BHFV,
            normaliser_BHF=normaliser_BHF,
            keep_state=keep_state,
            at_BS=at_BT,
        )
        return result
    compute = accumulator(q_BTHK.dtype)
    places_BT = position_BT
    if position_BT is not None and at_BT is not None:
        places_BT = position_BT.expand(len(at_BT), -1).gather(1, at_BT)
    query, key = (
        mapped(feature_map, x_BTHK.to(compute), projection_PK, places, max_len)
        for x_BTHK, places in ((q_BTHK, places_BT), (k_BTHK, position_BT))
    )
    y_BTHV, memory, normaliser = FAMILY.load(backend)(
        query,
        key,
        v_BTHV.to(compute),
        expansion=expansion_of(feature_map),
        log_decay_H=None if log_decay_H is None else log_decay_H.to(compute),
        exists_BT=exists_BT,
        normalise=normalise,
        memory_BHFV=memory_BHFV,
        normaliser_BHF=normaliser_BHF,
        keep_state=keep_state,
        at_BT=at_BT,
    )
    return y_BTHV.to(q_BTHK.dtype), memory, normaliser


def prefix_state(
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    feature_map: str = "taylor",
    exists_BT: Tensor | None = None,
    backend: str = "chunked",
) -> tuple[Tensor, Tensor]:
    """Return the memory and normaliser that tokens leave which every query may see.

    Begin `linear_attention` with them, and its queries read these tokens whatever their order.

    Args:
        k_BTHK, v_BTHV: one floating dtype.
        feature_map: a name of `MAPS` that needs nothing but the key.
        exists_BT: False where a token is padding and leaves no trace.
        backend: `triton`, or any other: there is one way to add up a prefix without it.

    Raises:
        ValueError: no such feature map, or one that needs more than the key.
    """
    feature_size(feature_map, k_BTHK.shape[-1])
    if backend == "triton":
        from archsearch_kernels import taylor_linear_attention as taylor

        _require_taylor(feature_map, None, True)
        return taylor.prefix_state(k_BTHK, v_BTHV, exists_BT=exists_BT, backend=backend)
    compute = accumulator(k_BTHK.dtype)
    key_BTHK = mapped(feature_map, k_BTHK.to(compute), None, None, None)
    key_BTHF = features_of(expansion_of(feature_map), key_BTHK, exists_BT)
    memory_BHFV = torch.einsum("bthf,bthv->bhfv", key_BTHF, v_BTHV.to(compute))
    return memory_BHFV, key_BTHF.sum(1)


def _require_taylor(feature_map: str, log_decay_H: Tensor | None, normalise: bool) -> None:
    if feature_map != "taylor" or log_decay_H is not None or not normalise:
        asked = feature_map + " with a decay" * (log_decay_H is not None)
        raise ValueError(
            "the backend 'triton' of linear attention has programs for the map taylor with its "
            f"normaliser and no decay, not for {asked}" + ", not normalised" * (not normalise)
        )


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check; the state is one that five random tokens leave behind, and decays."""
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
        tensors["log_decay_H"] = torch.log1p(-torch.exp2(-3.0 - torch.arange(H).double()))
    return Call(tensors, {}, frozenset(("memory_BHFV", "normaliser_BHF", "log_decay_H")))


FAMILY = Family(
    name="linear_attention",
    op=linear_attention,
    backends={
        "reference": "archsearch_kernels.linear_attention.reference:linear_attention",
        "quadratic": "archsearch_kernels.linear_attention.quadratic:linear_attention",
        "chunked": "archsearch_kernels.linear_attention.chunked:linear_attention",
        "triton": "archsearch_kernels.taylor_linear_attention.triton:taylor_linear_attention",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "chunked"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    | {("cuda", dtype): "triton" for dtype in (torch.bfloat16, torch.float16)},
    instead={"triton": "chunked"},
    only_on={"triton": "cuda"},
    borrowed={"triton": "taylor_linear_attention"},
    operands={"triton": torch.bfloat16},
)
