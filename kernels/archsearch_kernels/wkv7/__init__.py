"""Time mixing of RWKV-7 (Peng et al., arXiv:2503.14456): the generalised delta rule.

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T
    y_t = S_t r_t

A memory S of V x K numbers, each column of which decays by its own w in [0, 1]. What S holds at the
key a_t is written again at b_t: RWKV-7 has a = -n and b = n * rate for a key n of length 1, which
takes away what was stored there, each channel at its own rate. Other a and b may let S grow without
bound. Nothing is scaled or normalised here.

Shape suffixes: B batch, T tokens, H heads, K key size, V value size.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def wkv7(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    *,
    state_BHVK: Tensor | None = None,
    keep_state: bool = True,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Return y_BTHV in the dtype of r, and the memory after the last token.

    Args:
        r_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK: one floating dtype.
        log_decay_BTHK: log(w) <= 0, fp32; -inf empties a column of the memory.
        state_BHVK: memory to continue from, fp32 (fp64 for fp64 inputs); None: zeros.
        keep_state: False leaves the final memory out (None), which saves its work.
        backend: `reference` or `chunked`.

    Raises:
        LookupError: no such backend.
    """
    result: tuple[Tensor, Tensor | None] = FAMILY.load(backend)(
        r_BTHK,
        k_BTHK,
        v_BTHV,
        log_decay_BTHK,
        a_BTHK,
        b_BTHK,
        state_BHVK=state_BHVK,
        keep_state=keep_state,
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: a and b of RWKV-7, decays from none to strong, values wider than keys."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, H, K = sizes.batch, sizes.tokens, sizes.heads, sizes.head_size
    V = K + 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n_BTHK = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    tensors = {
        "r_BTHK": normal(B, T, H, K),
        "k_BTHK": normal(B, T, H, K),
        "v_BTHV": normal(B, T, H, V),
        "log_decay_BTHK": -normal(B, T, H, K).mul(2).exp(),
        "a_BTHK": -n_BTHK,
        "b_BTHK": n_BTHK * normal(B, T, H, K).sigmoid(),
    }
    if sizes.state:
        tensors["state_BHVK"] = normal(B, H, V, K)
    return Call(tensors, {}, frozenset(("log_decay_BTHK", "state_BHVK")))


FAMILY = Family(
    name="wkv7",
    op=wkv7,
    backends={
        "reference": "archsearch_kernels.wkv7.reference:wkv7",
        "chunked": "archsearch_kernels.wkv7.chunked:wkv7",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "chunked"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
