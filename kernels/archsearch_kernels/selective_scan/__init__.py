"""Selective state space recurrence, S6 (Gu and Dao, arXiv:2312.00752, algorithm 2).

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t
    y_t = C_t h_t + D x_t

Each channel has N states of its own. How fast they forget (dt) depends on the token and the
channel, what is written (B) and read (C) on the token alone. The input is discretised by Euler's
rule and the decay exactly, as in the authors' code. A <= 0 and dt >= 0, or states grow without
bound; softplus, gate and projections are the caller's.

Shape suffixes: B batch, T tokens, C channels, N states of a channel.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def selective_scan(
    x_BTC: Tensor,
    dt_BTC: Tensor,
    A_CN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_C: Tensor,
    *,
    state_BCN: Tensor | None = None,
    keep_state: bool = True,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Return y_BTC in the dtype of x, and the state after the last token.

    Args:
        x_BTC, B_BTN, C_BTN: one floating dtype.
        dt_BTC: step sizes >= 0, fp32.
        A_CN: rates <= 0, fp32.
        D_C: what passes by the states, any floating dtype.
        state_BCN: states to continue from, fp32 (fp64 for fp64 inputs); None: zeros.
        keep_state: False leaves the final states out (None).
        backend: `reference` or `associative`.

    Raises:
        LookupError: no such backend.
    """
    result: tuple[Tensor, Tensor | None] = FAMILY.load(backend)(
        x_BTC, dt_BTC, A_CN, B_BTN, C_BTN, D_C, state_BCN=state_BCN, keep_state=keep_state
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: steps from tiny to such that forget at once; N = head size."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, C, N = sizes.batch, sizes.tokens, sizes.heads * 3, sizes.head_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "x_BTC": normal(B, T, C),
        "dt_BTC": normal(B, T, C).mul(2).sub(2).exp().clamp(max=4),
        "A_CN": -normal(C, N).exp(),
        "B_BTN": normal(B, T, N),
        "C_BTN": normal(B, T, N) * N**-0.5,
        "D_C": normal(C),
    }
    if sizes.state:
        tensors["state_BCN"] = normal(B, C, N)
    return Call(tensors, {}, frozenset(("dt_BTC", "A_CN", "state_BCN")))


FAMILY = Family(
    name="selective_scan",
    op=selective_scan,
    backends={
        "reference": "archsearch_kernels.selective_scan.reference:selective_scan",
        "associative": "archsearch_kernels.selective_scan.associative:selective_scan",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "associative"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
