"""Linear attention whose memory forgets, by channel or by head (GLA, arXiv:2312.06635, eq. 3).

    S_t = diag(a_t) S_{t-1} + k_t v_t^T
    y_t = S_t^T q_t

A memory S of K x V numbers. The decays a_t in [0, 1] are K numbers, one for each row of S, or one
for the whole head: retention (arXiv:2307.08621) where it is the same for all tokens, the state
space duality of Mamba-2 (arXiv:2405.21060) where it depends on the token. All heads may share their
queries and keys. Nothing is scaled or normalised here.

Shape suffixes: B batch, T tokens, H heads, G heads of queries and keys (H or 1), K key size, V
value size, R decays of a head (K or 1).
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def gated_linear(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHR: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    keep_state: bool = True,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Return y_BTHV in the dtype of q, and the memory after the last token.

    Args:
        q_BTGK, k_BTGK, v_BTHV: one floating dtype.
        log_decay_BTHR: log(a) <= 0, fp32; -inf empties the memory.
        state_BHKV: memory to continue from, fp32 (fp64 for fp64 inputs); None: zeros.
        keep_state: False leaves the final memory out (None), which saves its work.
        backend: `reference`, `parallel` or `chunked`.

    Raises:
        LookupError: no such backend.
    """
    result: tuple[Tensor, Tensor | None] = FAMILY.load(backend)(
        q_BTGK, k_BTGK, v_BTHV, log_decay_BTHR, state_BHKV=state_BHKV, keep_state=keep_state
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: decays from none to strong, values wider than keys.

    Each channel has its own decay; with a state to continue from, there is one for each head, and
    heads share queries and keys. So a check over both sees both forms of a backend.
    """
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, H, K = sizes.batch, sizes.tokens, sizes.heads, sizes.head_size
    G, R = (1, 1) if sizes.state else (H, K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q_BTGK": normal(B, T, G, K),
        "k_BTGK": normal(B, T, G, K),
        "v_BTHV": normal(B, T, H, K + 3),
        "log_decay_BTHR": -normal(B, T, H, R).mul(2).exp(),
    }
    if sizes.state:
        tensors["state_BHKV"] = normal(B, H, K, K + 3)
    return Call(tensors, {}, frozenset(("log_decay_BTHR", "state_BHKV")))


FAMILY = Family(
    name="gated_linear",
    op=gated_linear,
    backends={
        "reference": "archsearch_kernels.gated_linear.reference:gated_linear",
        "parallel": "archsearch_kernels.gated_linear.parallel:gated_linear",
        "chunked": "archsearch_kernels.gated_linear.chunked:gated_linear",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "chunked"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
