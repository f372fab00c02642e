"""Who is timed: our backends, and peers where they are installed and run.

A contender names what it computes, because not all peers compute the same: softmax attention stands
beside linear attention as what one would use without it, and a sum without a denominator is named
so. Peers are called by keyword and in their own layout.

Shape suffixes: B batch, T tokens, H heads, K key size, V value size.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from archsearch_kernels import REFERENCE, family
from archsearch_kernels import taylor_linear_attention as taylor
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from archsearch.bench_kernels.cases import Case

Inputs = Mapping[str, Tensor]
Call = Callable[[Inputs], tuple[Tensor, ...]]
"""Inputs to y, or to y and the state that a step leaves."""

_FAMILIES = {
    "taylor": "taylor_linear_attention",
    "elu": "linear_attention",
    "window": "sliding_window",
    "conv_silu": "short_conv",
    "conv_gate": "short_conv",
}


@dataclass(frozen=True)
class Contender:
    """One way to do a case's work.

    Attributes:
        name: `archsearch` and a backend, or the peer.
        computes: which function, as `truth.error` names it.
        call: inputs to results.
        case: the work with the sizes that this contender has.
    """

    name: str
    computes: str
    call: Call
    case: Case

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("archsearch")


def contenders(case: Case, device: str) -> Iterator[Contender]:
    """Everyone who can do the work on a device. Nothing is imported that is not installed."""
    for backend in _backends(case, device):
        yield Contender(f"archsearch {backend}", case.mixing, _OURS[case.work](case, backend), case)
    if case.work not in ("forward", "training"):
        return
    if case.taps:
        yield Contender("torch conv1d", case.mixing, _conv1d(case), case)
        return
    if find_spec("fla") is not None and device == "cuda":
        yield from _of_fla(case)
    if case.mixing == "window":
        yield from _windows(case, device)
    else:
        yield from _softmax(case.as_softmax(), device)


def _backends(case: Case, device: str) -> list[str]:
    """Our backends for a case; the reference, token after token, only where there is no other."""
    found = family(_FAMILIES[case.mixing]).backends_on(device)
    named = [name for name in found if name not in (REFERENCE, "quadratic")]
    if case.mixing == "elu":
        return [name for name in named if name != "triton"]
    if case.mixing == "taylor" and case.work in ("forward", "training"):
        named.append("chunked")  # of `linear_attention`
    return named or [REFERENCE]


def _ours(case: Case, backend: str) -> Call:
    def call(given: Inputs) -> tuple[Tensor, ...]:
        if case.taps:
            silu, gate = case.mixing == "conv_silu", given.get("gate")
            options = {"gate_BTC": gate, "silu": silu, "residual": not silu}
            tensors = (given["x"], given["weight"], given["bias"])
            y, _ = family("short_conv").op(*tensors, **options, backend=backend)
            return (y,)
        tensors = (given["q"], given["k"], given["v"])
        if case.mixing == "window":
            window = family("sliding_window").op
            return (window(*tensors, window=case.window, backend=backend),)
        if case.mixing == "taylor" and backend != "chunked":
            y, *_ = taylor.taylor_linear_attention(*tensors, keep_state=False, backend=backend)
            return (y,)
        linear = family("linear_attention").op
        y, *_ = linear(*tensors, feature_map=case.mixing, keep_state=False, backend=backend)
        return (y,)

    return call


def _conv1d(case: Case) -> Call:
    def call(given: Inputs) -> tuple[Tensor, ...]:
        x_BCT, weight = F.pad(given["x"].mT, (case.taps - 1, 0)), given["weight"][:, None]
        y = F.conv1d(x_BCT, weight, given["bias"], groups=case.channels).mT
        return (F.silu(y) if case.mixing == "conv_silu" else y * given["gate"] + given["x"],)

    return call


def _our_prefix(case: Case, backend: str) -> Call:
    def call(given: Inputs) -> tuple[Tensor, ...]:
        memory, normaliser = taylor.prefix_state(
            given["k_first"], given["v_first"], backend=backend
        )
        y, *_ = taylor.taylor_linear_attention(
            given["q"],
            given["k"],
            given["v"],
            memory_BHFV=memory,
            normaliser_BHF=normaliser,
            keep_state=False,
            backend=backend,
        )
        return (y,)

    return call


def _our_step(case: Case, backend: str) -> Call:
    def call(given: Inputs) -> tuple[Tensor, ...]:
        q, k, v = (given[name][:, 0] for name in ("q", "k", "v"))
        y = taylor.step(q, k, v, given["memory"], given["normaliser"], backend=backend)
        return y, given["memory"], given["normaliser"]

    return call


_OURS = {"forward": _ours, "training": _ours, "prefix": _our_prefix, "step": _our_step}


def _of_fla(case: Case) -> Iterator[Contender]:
    def peer(function: str, **options: Any) -> Call:
        module, _, name = function.rpartition(".")
        op = getattr(import_module(f"fla.ops.{module}"), name)

        def call(given: Inputs) -> tuple[Tensor, ...]:
            y = op(q=given["q"], k=given["k"], v=given["v"], **options)
            return (y[0] if isinstance(y, tuple) else y,)

        return call

    if case.mixing == "taylor":
        for name in ("fused_chunk_based", "parallel_based"):
            yield Contender(f"fla {name}", "taylor", peer(f"based.{name}"), case)
    if case.mixing == "elu":
        plain = peer("linear_attn.chunk_linear_attn", scale=1.0, normalize=False)

        def mapped(given: Inputs) -> tuple[Tensor, ...]:
            q, k = (F.elu(given[name]) + 1 for name in ("q", "k"))
            return plain({"q": q, "k": k, "v": given["v"]})

        yield Contender("fla chunk_linear_attn, no denominator", "elu_sum", mapped, case)


def _softmax(case: Case, device: str) -> Iterator[Contender]:
    kinds = {
        "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
        "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
    }
    for name, backend in kinds.items() if device == "cuda" else [("SDPA", SDPBackend.MATH)]:

        def call(given: Inputs, backend: SDPBackend = backend) -> tuple[Tensor, ...]:
            q, k, v = (given[one].transpose(1, 2) for one in ("q", "k", "v"))
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return (y.transpose(1, 2),)

        yield Contender(name, "softmax", call, case)


def _windows(case: Case, device: str) -> Iterator[Contender]:
    if device != "cuda":
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < case.window)

    mask = create_block_mask(visible, None, None, case.tokens, case.tokens, device=device)
    compiled = partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)

    def call(given: Inputs) -> tuple[Tensor, ...]:
        q, k, v = (given[name].transpose(1, 2) for name in ("q", "k", "v"))
        return (compiled(q, k, v).transpose(1, 2),)

    yield Contender("FlexAttention", "window", call, case)
