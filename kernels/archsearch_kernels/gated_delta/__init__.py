"""Gated delta rule (Yang et al., arXiv:2412.06464, eq. 10).

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
    y_t = S_t q_t

A memory S of V x K numbers decays by alpha in (0, 1], and is corrected along the key by what it
predicts wrongly. Keys should have length 1 and 0 <= beta <= 1 (2 at most), or S may grow without
bound. Nothing is scaled or normalised here.

Shape suffixes: B batch, T tokens, H heads, K key size, V value size.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def gated_delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    state_BHVK: Tensor | None = None,
    keep_state: bool = True,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Return y_BTHV in the dtype of q, and the memory after the last token.

    Args:
        q_BTHK, k_BTHK, v_BTHV: one floating dtype.
        log_decay_BTH: log(alpha) <= 0, fp32; -inf empties the memory.
        beta_BTH: how much of the error is corrected, fp32.
        state_BHVK: memory to continue from, fp32 (fp64 for fp64 inputs); None: zeros.
        keep_state: False leaves the final memory out (None), which saves its work.
        backend: `reference` or `chunked`.

    Raises:
        LookupError: no such backend.
    """
    result: tuple[Tensor, Tensor | None] = FAMILY.load(backend)(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        log_decay_BTH,
        beta_BTH,
        state_BHVK=state_BHVK,
        keep_state=keep_state,
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: unit keys, decays from none to strong, values wider than keys."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, H, K = sizes.batch, sizes.tokens, sizes.heads, sizes.head_size
    V = K + 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k_BTHK = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    tensors = {
        "q_BTHK": normal(B, T, H, K),
        "k_BTHK": k_BTHK,
        "v_BTHV": normal(B, T, H, V),
        "log_decay_BTH": -normal(B, T, H).mul(2).exp(),
        "beta_BTH": normal(B, T, H).sigmoid(),
    }
    if sizes.state:
        tensors["state_BHVK"] = normal(B, H, V, K)
    return Call(tensors, {}, frozenset(("log_decay_BTH", "beta_BTH", "state_BHVK")))


FAMILY = Family(
    name="gated_delta",
    op=gated_delta,
    backends={
        "reference": "archsearch_kernels.gated_delta.reference:gated_delta",
        "chunked": "archsearch_kernels.gated_delta.chunked:gated_delta",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "chunked"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
