"""The selective scan in chunks, each an associative scan; no state is kept but one a chunk.

With a_t = exp(dt_t A) and b_t = dt_t B_t x_t, two neighbouring tokens act on a state as one with

    a = a_2 a_1        b = b_2 + a_2 b_1

so the states after every second token are those of a sequence half as long, and the others are one
step away (Blelloch 1990): depth log T, work of order T. Only decays in [0, 1] are multiplied, so
that nothing overflows and no difference of sums loses digits. Which terms meet where depends on
their places alone, so that a later token changes no bit of an earlier output.

The scan is an op of its own. Its gradient is the same scan, from the last token back, over states
that are computed again chunk by chunk: what is kept for it is as large as the inputs.

Shape suffixes: B batch, T tokens of a sequence or a chunk, C channels, N states of a channel, G
groups with rates of their own (members of a population), K chunks; X everything but time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator

CHUNK = 64
"""Tokens of a chunk: their states are in memory at once."""


def selective_scan(
    x_BTC: Tensor,
    dt_BTC: Tensor,
    A_CN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_C: Tensor,
    *,
    state_BCN: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `archsearch_kernels.selective_scan.selective_scan`."""
    compute = accumulator(x_BTC.dtype)
    x, dt, A, write, read, D = (
        tensor.to(compute) for tensor in (x_BTC, dt_BTC, A_CN, B_BTN, C_BTN, D_C)
    )
    if state_BCN is None:
        state_BCN = x.new_zeros(x.shape[0], *A.shape)
    timed = (tensor.transpose(0, 1).unsqueeze(1) for tensor in (x, dt, write, read))
    y_TGBC, last_GBCN, _ = _Scan.apply(*timed, A[None], state_BCN[None])  # type: ignore[no-untyped-call]
    y_BTC = y_TGBC.squeeze(1).transpose(0, 1) + D * x
    return y_BTC.to(x_BTC.dtype), last_GBCN.squeeze(0) if keep_state else None


class _Scan(torch.autograd.Function):
    """(x, dt, B, C, A, state) -> y without the skip D, the last state, and each chunk's first.

    Its vmap rule makes the mapped dimension part of the groups and calls the op on unmapped
    tensors, so that ordinary autograd sees it and the writes into fresh tensors stay legal.
    """

    @staticmethod
    def forward(
        x_TGBC: Tensor,
        dt_TGBC: Tensor,
        B_TGBN: Tensor,
        C_TGBN: Tensor,
        A_GCN: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs, starts = [], []
        for x, dt, write, read in _in_chunks(x_TGBC, dt_TGBC, B_TGBN, C_TGBN):
            starts.append(state)
            decay, states = _decays_and_writes(x, dt, write, A_GCN)
            states[0].addcmul_(decay[0], state)
            _scan_(decay, states)
            outputs.append(torch.einsum("tgbcn,tgbn->tgbc", states, read))
            state = states[-1].clone()
        return torch.cat(outputs), state, torch.stack(starts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        starts_KGBCN = output[2]
        ctx.mark_non_differentiable(starts_KGBCN)
        ctx.save_for_backward(*inputs[:5], starts_KGBCN)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        *timed, A_GCN, starts_KGBCN = ctx.saved_tensors
        grad_A, grad_state, grads = torch.zeros_like(A_GCN), grad_outputs[1], []
        chunks = zip(_in_chunks(*timed, grad_outputs[0]), starts_KGBCN.unbind(), strict=True)
        for (*inputs, grad_y), start in reversed(list(chunks)):
            *grad, grad_A_chunk, grad_state = _chunk_backward(
                inputs, A_GCN, start, grad_y, grad_state
            )
            grads.append(grad)
            grad_A += grad_A_chunk
        timed_grads = (torch.cat(parts[::-1]) for parts in zip(*grads, strict=True))
        return *timed_grads, grad_A, grad_state

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size: int = info.batch_size
        places = (1, 1, 1, 1, 0, 0)  # of the groups, in the inputs
        folded = [
            (x.unsqueeze(place) if dim is None else x.movedim(dim, place))
            .expand(*(size if i == place else -1 for i in range(x.dim() + (dim is None))))
            .flatten(place, place + 1)
            for x, dim, place in zip(inputs, in_dims, places, strict=True)
        ]
        y, last, starts = _Scan.apply(*folded)  # type: ignore[no-untyped-call]
        outputs = [(y, 1), (last, 0), (starts, 1)]
        return tuple(x.unflatten(place, (size, -1)) for x, place in outputs), (1, 0, 1)


def _chunk_backward(
    inputs: Sequence[Tensor], A_GCN: Tensor, start: Tensor, grad_y: Tensor, grad_last: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of one chunk's x, dt, B and C, of A, and of the state before the chunk."""
    x, dt, write, read = inputs
    decay, states = _decays_and_writes(x, dt, write, A_GCN)
    states[0].addcmul_(decay[0], start)
    _scan_(decay.clone(), states)
    grad = grad_y[..., None] * read[..., None, :]  # of each state, first from its own output alone
    grad[-1] += grad_last
    _scan_back_(torch.cat((decay[1:], torch.zeros_like(decay[:1]))), grad)
    grad_read = torch.einsum("tgbcn,tgbc->tgbn", states, grad_y)
    grad_start = decay[0] * grad[0]
    exponent = decay  # its gradient, that of dt A: decay * state before * gradient of the state
    exponent[1:] *= states[:-1]
    exponent[0] *= start
    exponent *= grad
    grad_A = torch.einsum("tgbcn,tgbc->gcn", exponent, dt)
    written = torch.einsum("tgbcn,tgbn->tgbc", grad, write)  # gradient of dt x
    grad_dt = torch.einsum("tgbcn,gcn->tgbc", exponent, A_GCN) + written * x
    grad_write = torch.einsum("tgbcn,tgbc->tgbn", grad, dt * x)
    return written * dt, grad_dt, grad_write, grad_read, grad_A, grad_start


def _decays_and_writes(
    x: Tensor, dt: Tensor, write: Tensor, A_GCN: Tensor
) -> tuple[Tensor, Tensor]:
    """Fresh tensors a and b of one chunk, (T, G, B, C, N)."""
    decay = (dt[..., None] * A_GCN[:, None]).exp_()
    return decay, (dt * x)[..., None] * write[..., None, :]


def _scan_(a_TX: Tensor, h_TX: Tensor) -> None:
    """h_t <- h_t + a_t h_{t-1}, the new one, from the first token on. Spends a."""
    T = a_TX.shape[0]
    if T == 1:
        return
    early, late = slice(0, T - 1, 2), slice(1, T, 2)
    h_TX[late].addcmul_(a_TX[late], h_TX[early])
    a_TX[late] *= a_TX[early]
    _scan_(a_TX[late], h_TX[late])
    h_TX[2::2].addcmul_(a_TX[2::2], h_TX[1 : T - 1 : 2])


def _scan_back_(a_TX: Tensor, g_TX: Tensor) -> None:
    """g_t <- g_t + a_t g_{t+1}, the new one, from the last token back. Spends a."""
    T = a_TX.shape[0]
    if T == 1:
        return
    odd = T % 2
    early, late = slice(odd, T - 1, 2), slice(odd + 1, T, 2)
    g_TX[early].addcmul_(a_TX[early], g_TX[late])
    a_TX[early] *= a_TX[late]
    _scan_back_(a_TX[early], g_TX[early])
    rest = slice(1 - odd, T - 1, 2)
    g_TX[rest].addcmul_(a_TX[rest], g_TX[2 - odd : T : 2])


def _in_chunks(*timed: Tensor) -> list[tuple[Tensor, ...]]:
    """The same chunk of every tensor, chunk by chunk; with time outermost in memory."""
    return list(zip(*(x.contiguous().split(CHUNK) for x in timed), strict=True))
