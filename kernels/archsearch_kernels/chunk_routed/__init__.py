"""Chunks of history routed to softmax keys or to a matrix memory (Deng et al., arXiv:2602.03681).

Tokens lie in chunks of C. A chunk that is complete has a route for each group of heads: r of it
goes to the keys that softmax attention sees, s of it into the memory; a hard route is (r, s) =
(1, 0) or (0, 1). Inside its own chunk a token has both operators, whatever the route will be:

    W_t = alpha_t W_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T     the chunk written
    X_t = alpha_t X_{t-1}                                               the chunk spared
    y_t = W_t q_t
    z_t = sum_j f_tj exp(a_tj) v_j / sum_j f_tj exp(a_tj),   a_tj = q'_t . k'_j / sqrt(I)

with f_tj = 1 for j <= t in the chunk of t, r of its chunk for j in an earlier chunk, 0 elsewhere.
After the last token of a chunk, W and X both become s W + (1 - s) X. Nothing visible is z = 0.

This is the paper's equations 10 to 20, continued to real r and s between 0 and 1: the derivatives
at hard routes are its gradients of the masks (eq. 15 for r) and of the state (eq. 17 for s). At
r = 0 an exponent above that of the largest visible score counts as at most e^60 times it.

Switches: `delta` False leaves out the correction, W_t = alpha_t W_{t-1} + beta_t v_t k_t^T, as in
Mamba-2 (arXiv:2405.21060); `decay_through` False leaves out alpha_t from X; `inside` "softmax"
reads X instead of W, `inside` "linear" makes f_tj = 0 in the chunk of t.

Shape suffixes: B batch, T tokens, N chunks that the tokens touch, G groups, H memories, K and V
sizes of their keys and values, A softmax heads, I and U sizes of their keys and values, W values
of all heads, S slots.
"""

import torch
from torch import Tensor

from archsearch_kernels.chunk_routed.inputs import Cache, Inputs, Rules
from archsearch_kernels.chunk_routed.routing import chunks_touched, place
from archsearch_kernels.family import Call, Family, Sizes
from archsearch_kernels.precision import accumulator

__all__ = ["FAMILY", "Rules", "chunk_routed", "make_inputs"]


def chunk_routed(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    q_BTAI: Tensor,
    k_BTAI: Tensor | None,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    to_keys_BNG: Tensor,
    to_memory_BNG: Tensor,
    *,
    rules: Rules,
    written_BHVK: Tensor | None = None,
    spared_BHVK: Tensor | None = None,
    key_BSAI: Tensor | None = None,
    value_BSAU: Tensor | None = None,
    kept_BG: Tensor | None = None,
    offset_B: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z and y as y_BT2W in the dtype of q, and W and X after the last token.

    A token's values of all heads stand in one row: W = A U = H V.

    Args:
        q_BTHK, k_BTHK, v_BTHV: of the memories; the values of the A softmax heads are those of the
            H memories, cut anew.
        q_BTAI, k_BTAI: of the softmax heads. No k: the key and value of a lone token already lie in
            the cache, behind the `offset_B` tokens of its chunk.
        log_decay_BTH: log(alpha) <= 0, fp32.
        beta_BTH: strength of a write, fp32.
        to_keys_BNG, to_memory_BNG: r and s of the chunks touched, the one of the first token first
            (`chunks_touched` says how many); what stands there for one not complete is unused.
        rules: see `Rules`.
        written_BHVK, spared_BHVK: W and X, fp32 (fp64 for fp64 inputs). None: a new sequence, which
            has no past at all.
        key_BSAI, value_BSAU: the cache; its first slots hold the kept chunks, then the chunk that
            is not complete.
        kept_BG: chunks kept in the cache; int64, on the device.
        offset_B: tokens already in the chunk that is not complete; int64, on the device.
        backend: `reference` or `chunked`.

    Raises:
        LookupError: no such backend.
    """
    compute = accumulator(q_BTHK.dtype)
    B, T, H, V = v_BTHV.shape
    chunk_BT, complete_BN = place(T, rules.chunk, offset_B, q_BTHK.device)
    if written_BHVK is None or spared_BHVK is None:
        written_BHVK = spared_BHVK = v_BTHV.new_zeros(B, H, V, k_BTHK.shape[-1], dtype=compute)
    cache = None
    if key_BSAI is not None:
        assert value_BSAU is not None and kept_BG is not None and offset_B is not None
        cache = Cache(
            keys=key_BSAI.to(compute),
            values=value_BSAU.to(compute),
            kept=kept_BG,
            behind=offset_B + (k_BTAI is None),
        )
    given = Inputs(
        q=q_BTHK.to(compute),
        k=k_BTHK.to(compute),
        v=v_BTHV.to(compute),
        q_soft=q_BTAI.to(compute),
        k_soft=None if k_BTAI is None else k_BTAI.to(compute),
        log_decay=log_decay_BTH,
        beta=beta_BTH.to(compute),
        to_keys=to_keys_BNG.to(compute),
        to_memory=to_memory_BNG.to(compute),
        written=written_BHVK,
        spared=spared_BHVK,
        cache=cache,
        offset=offset_B,
        chunk_of=chunk_BT,
        complete=complete_BN,
        rules=rules,
    )
    z_BTAU, y_BTHV, *memories = FAMILY.load(backend)(given)
    y_BT2W = torch.stack((z_BTAU.flatten(2), y_BTHV.flatten(2)), dim=2)
    return y_BT2W.to(q_BTHK.dtype), memories[0], memories[1]


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: chunks of 8, two softmax heads of one memory, hard routes of each kind."""
    generator = torch.Generator().manual_seed(sizes.seed)
    B, T, H, K = sizes.batch, sizes.tokens, sizes.heads, sizes.head_size
    V, rules = K + 2, Rules(chunk=8)
    A = 2 * H if K % 2 == 0 else H
    N = chunks_touched(T, rules.chunk, fresh=not sizes.state)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    to_keys_BNG = (normal(B, N, H) > 0).double()
    tensors = {
        "q_BTHK": normal(B, T, H, K),
        "k_BTHK": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v_BTHV": normal(B, T, H, V),
        "q_BTAI": normal(B, T, A, H * K // A),
        "k_BTAI": normal(B, T, A, H * K // A),
        "log_decay_BTH": -normal(B, T, H).mul(2).exp(),
        "beta_BTH": normal(B, T, H).sigmoid(),
        "to_keys_BNG": to_keys_BNG,
        "to_memory_BNG": 1 - to_keys_BNG,
    }
    options: dict[str, object] = {"rules": rules}
    if sizes.state:
        slots = 3 * rules.chunk
        tensors |= {
            "written_BHVK": normal(B, H, V, K),
            "spared_BHVK": normal(B, H, V, K),
            "key_BSAI": normal(B, slots, A, H * K // A),
            "value_BSAU": normal(B, slots, A, H * V // A),
        }
        options["kept_BG"] = (torch.arange(B * H) % 3).view(B, H)
        options["offset_B"] = 5 * torch.arange(B) % rules.chunk
    wide = frozenset(
        ("log_decay_BTH", "beta_BTH", "to_keys_BNG", "to_memory_BNG", "written_BHVK", "spared_BHVK")
    )
    return Call(tensors, options, wide)


FAMILY = Family(
    name="chunk_routed",
    op=chunk_routed,
    backends={
        "reference": "archsearch_kernels.chunk_routed.reference:chunk_routed",
        "chunked": "archsearch_kernels.chunk_routed.chunked:chunk_routed",
    },
    make_inputs=make_inputs,
    auto={
        (device, dtype): "chunked"
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
