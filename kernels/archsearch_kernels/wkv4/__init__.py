"""Time mixing of RWKV-4 (Peng et al., arXiv:2305.13048, eq. 16 and appendix D).

    y_t = (a_{t-1} + exp(u + k_t) v_t) / (b_{t-1} + exp(u + k_t))
    a_t = exp(-w) a_{t-1} + exp(k_t) v_t
    b_t = exp(-w) b_{t-1} + exp(k_t)

Each channel on its own: a mean of all values so far, weighted by exponentials of their keys that
decay at rate w >= 0, where the current token counts exp(u) times.

A state is three numbers a channel, a = numerator exp(exponent) and b = denominator exp(exponent),
where the exponent is the largest of k_j - (t - j) w so far: exponentials neither overflow nor are
all lost, and the denominator is 1 at least. The empty state is zeros: **where the denominator is
0, the exponent is not looked at**.

Shape suffixes: B batch, T tokens, C channels.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes
from archsearch_kernels.wkv4.sums import Sums


def wkv4(
    k_BTC: Tensor,
    v_BTC: Tensor,
    log_decay_C: Tensor,
    bonus_C: Tensor,
    *,
    numerator_BC: Tensor | None = None,
    denominator_BC: Tensor | None = None,
    exponent_BC: Tensor | None = None,
    keep_state: bool = True,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return y_BTC in the dtype of k; numerator, denominator and exponent after the last token.

    Args:
        k_BTC, v_BTC: one floating dtype.
        log_decay_C: -w <= 0, fp32.
        bonus_C: u, fp32.
        numerator_BC, denominator_BC, exponent_BC: state to continue from, all or none, fp32 (fp64
            for fp64 inputs); None or zeros: empty.
        keep_state: False leaves the final state out (None).
        backend: `reference` or `associative`.

    Raises:
        LookupError: no such backend.
    """
    state: Sums | None = None
    if numerator_BC is not None:
        assert denominator_BC is not None and exponent_BC is not None
        state = Sums(numerator_BC, denominator_BC, exponent_BC)
    y_BTC, last = FAMILY.load(backend)(
        k_BTC, v_BTC, log_decay_C, bonus_C, state=state, keep_state=keep_state
    )
    return (y_BTC, None, None, None) if last is None else (y_BTC, *last)


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: keys of all sizes, decays from weak to strong."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, C = sizes.batch, sizes.tokens, sizes.heads * sizes.head_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "k_BTC": 2 * normal(B, T, C),
        "v_BTC": normal(B, T, C),
        "log_decay_C": -normal(C).mul(2).sub(1).exp(),
        "bonus_C": normal(C),
    }
    if sizes.state:
        tensors["numerator_BC"] = normal(B, C)
        tensors["denominator_BC"] = 1 + normal(B, C).exp()
        tensors["exponent_BC"] = normal(B, C)
    wide = ("log_decay_C", "bonus_C", "numerator_BC", "denominator_BC", "exponent_BC")
    return Call(tensors, {}, frozenset(wide))


FAMILY = Family(
    name="wkv4",
    op=wkv4,
    backends={
        "reference": "archsearch_kernels.wkv4.reference:wkv4",
        "associative": "archsearch_kernels.wkv4.associative:wkv4",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "associative"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
