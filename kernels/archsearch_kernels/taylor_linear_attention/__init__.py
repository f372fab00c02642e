"""Kernels of causal linear attention with BASED's second-order Taylor map (arXiv:2402.18668).

    w_ij = phi(q_i) . phi(k_j) = 1 + t + t^2/2      t = q_i . k_j / sqrt(K)
    S_i = S_{i-1} + phi(k_i) v_i^T                  z_i = z_{i-1} + phi(k_i)
    y_i = phi(q_i)^T S_i / (phi(q_i) . z_i + 1e-6)

phi makes F = 1 + K + K(K+1)/2 features, in the order of `linear_attention.taylor.features`: each
product of two numbers once. This is `linear_attention` with the map `taylor`, no decay and its
normaliser; that family's backend `triton` is this one's.

`prefix_state` is what tokens leave that every query may see, whatever the order: begin with it and
the start of a text has been read as a whole (just read twice, arXiv:2407.05483). `step` reads one
token and changes its state in place.

The backend `triton` multiplies operands rounded to bf16 for inputs in half precision (fp16 has no
room for a state) and adds in fp32; states, normalisers and denominators are fp32 throughout.
Products of fp32 inputs are exact fp32, which no matrix unit does: correct, not fast.

Shape suffixes: B batch, T tokens, H heads, K query and key size, V value size, F features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes

KEY_SIZES = (4, 32)
"""Smallest and largest K of the backend `triton`."""

LONGEST_PAIRS = 512
"""Keys up to which `triton` goes through all pairs, if it has no state to read or leave: there both
ways take about as many FLOPs at K = 16, where a token has 153 features."""

WIDEST_VALUE = 128
"""Largest V of the backend `triton`."""


def taylor_linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    exists_BT: Tensor | None = None,
    memory_BHFV: Tensor | None = None,
    normaliser_BHF: Tensor | None = None,
    keep_state: bool = True,
    at_BS: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y_BTHV in the dtype of q, and the memory and normaliser after the last token.

    Args:
        q_BTHK, k_BTHK, v_BTHV: one floating dtype. `triton` takes no fp64.
        exists_BT: False where a token is padding: it leaves no trace in any state or output but its
            own, and its own is 0 while nothing has been read.
        memory_BHFV, normaliser_BHF: state to continue from, fp32 (fp64 for fp64 inputs).
        keep_state: False leaves the two final states out (None), which saves their work.
        at_BS: index among the keys of every query, in any order, for S queries that are fewer than
            the keys; `triton` takes them without a state, over up to `LONGEST_PAIRS` keys. None:
            query t stands at key t.
        backend: `reference` or `triton` (on CUDA).

    Raises:
        LookupError: no such backend.
        ValueError: sizes or a dtype that the backend does not take.
    """
    assert (memory_BHFV is None) == (normaliser_BHF is None)
    result: tuple[Tensor, Tensor | None, Tensor | None] = FAMILY.load(backend)(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        exists_BT=exists_BT,
        memory_BHFV=memory_BHFV,
        normaliser_BHF=normaliser_BHF,
        keep_state=keep_state,
        at_BS=at_BS,
    )
    return result


def prefix_state(
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    exists_BT: Tensor | None = None,
    length_B: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the memory and normaliser that tokens leave which every query may see.

    Args:
        k_BTHK, v_BTHV: one floating dtype.
        exists_BT: False where a token is padding and leaves no trace.
        length_B: tokens of each row, integers on its device; None: all T.

    Raises:
        LookupError: no such backend.
        ValueError: sizes or a dtype that the backend does not take.
    """
    state: tuple[Tensor, Tensor] = _PREFIX.load(backend)(
        k_BTHK, v_BTHV, exists_BT=exists_BT, length_B=length_B
    )
    return state


def step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    memory_BHFV: Tensor,
    normaliser_BHF: Tensor,
    *,
    backend: str,
) -> Tensor:
    """Read one token: return y_BHV, and change the state in place. No gradient.

    Raises:
        LookupError: no such backend.
        ValueError: sizes or a dtype that the backend does not take.
    """
    y_BHV: Tensor = _STEP.load(backend)(q_BHK, k_BHK, v_BHV, memory_BHFV, normaliser_BHF)
    return y_BHV


def takes(key_size: int, value_size: int) -> bool:
    """Whether the backend `triton` has programs for these sizes."""
    return KEY_SIZES[0] <= key_size <= KEY_SIZES[1] and 1 <= value_size <= WIDEST_VALUE


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
    # Without a state, as in training, short sequences go through programs of their own.
    options = {"keep_state": sizes.state}
    return Call(tensors, options, frozenset(("memory_BHFV", "normaliser_BHF")))


def _family(op: Callable[..., Any]) -> Family:
    package = "archsearch_kernels.taylor_linear_attention"
    return Family(
        name="taylor_linear_attention",
        op=op,
        backends={one: f"{package}.{one}:{op.__name__}" for one in ("reference", "triton")},
        make_inputs=make_inputs,
        auto={("cuda", dtype): "triton" for dtype in (torch.bfloat16, torch.float16)},
        only_on={"triton": "cuda"},
        operands={"triton": torch.bfloat16},
    )


FAMILY, _PREFIX, _STEP = _family(taylor_linear_attention), _family(prefix_state), _family(step)
