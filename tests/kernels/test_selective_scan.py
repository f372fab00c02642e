"""The selective scan: its definition written out a second time, segments, and extreme decays."""

from collections.abc import Callable

import pytest
import torch
from archsearch_kernels import Sizes, family
from torch import Tensor
from torch.func import vmap

OP, BACKENDS = family("selective_scan").op, tuple(family("selective_scan").backends)
EXACT = 1e-10
"""fp64 has 16 digits; a few hundred terms in another order lose two or three."""


def inputs(tokens: int, state: bool = False) -> dict[str, Tensor]:
    sizes = Sizes(batch=2, tokens=tokens, heads=1, head_size=4, state=state)
    return dict(family("selective_scan").make_inputs(sizes).tensors)


def textbook(
    x_BTC: Tensor,
    dt_BTC: Tensor,
    A_CN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_C: Tensor,
    state_BCN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """No recurrence: every output as a sum over earlier tokens, decayed by the steps between."""
    B, T, C = x_BTC.shape
    rows, lasts = [], []
    for b in range(B):
        for c in range(C):
            elapsed = torch.stack([dt_BTC[b, : t + 1, c].sum() for t in range(T)])
            for t in range(T):
                h = sum(
                    (A_CN[c] * (elapsed[t] - elapsed[s])).exp()
                    * dt_BTC[b, s, c]
                    * B_BTN[b, s]
                    * x_BTC[b, s, c]
                    for s in range(t + 1)
                )
                if state_BCN is not None:
                    h = h + (A_CN[c] * elapsed[t]).exp() * state_BCN[b, c]
                rows.append(C_BTN[b, t] @ h + D_C[c] * x_BTC[b, t, c])
            lasts.append(h)
    y = torch.stack(rows).view(B, C, T).transpose(1, 2)
    return y, torch.stack(lasts).view(B, C, -1)


def results(
    op: Callable[..., object], tensors: dict[str, Tensor], **options: object
) -> list[Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    outputs = list(op(**leaves, **options))  # type: ignore[call-overload]
    weights = [torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), weights)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_every_backend_is_the_textbook_sum(backend: str, state: bool, tokens: int) -> None:
    tensors = inputs(tokens, state)
    found = results(OP, tensors, backend=backend)
    for mine, theirs in zip(found, results(textbook, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("tokens", [63, 64, 65, 129, 200])
def test_chunks_join_as_if_there_were_none(tokens: int) -> None:
    tensors = inputs(tokens, state=True)
    found = results(OP, tensors, backend="associative")
    for mine, theirs in zip(found, results(OP, tensors, backend="reference"), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(1,) * 20, (65, 1, 34)])
def test_segments_give_what_one_pass_gives(backend: str, cuts: tuple[int, ...]) -> None:
    tensors = inputs(sum(cuts), state=True)
    whole, last = OP(**tensors, backend=backend)
    state, parts, start = tensors.pop("state_BCN"), [], 0
    for cut in cuts:
        segment = {
            name: x[:, start : start + cut] if name.split("_")[1].startswith("BT") else x
            for name, x in tensors.items()
        }
        part, state = OP(**segment, state_BCN=state, backend=backend)
        parts.append(part)
        start += cut
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(state, last, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_from_tiny_to_huge_give_numbers(backend: str) -> None:
    """exp(dt A) from 1 to 0 within one chunk: no difference of sums may overflow or lose digits."""
    tensors = inputs(70)
    tensors["dt_BTC"] = 10.0 ** torch.linspace(-6, 4, 70, dtype=torch.float64)[None, :, None].roll(
        35, 1
    ).expand(2, 70, 3)
    exact = results(OP, tensors, backend="reference")
    narrow = {name: x.float() for name, x in tensors.items()}
    for mine, truth in zip(results(OP, narrow, backend=backend), exact, strict=True):
        error = (mine.double() - truth).square().mean().sqrt()
        assert error < 1e-5 * truth.square().mean().sqrt()  # some 70 roundings of 6e-8


@pytest.mark.parametrize("mapped", ["x_BTC", "A_CN", "state_BCN"])
def test_one_mapped_input_is_enough(mapped: str) -> None:
    """Rules for vmap: an input without the mapped dimension is shared, its gradients add up."""
    tensors = inputs(9, state=True)
    stacked = torch.stack([tensors[mapped], 0.5 * tensors[mapped]]).requires_grad_()
    shared = {name: x.clone().requires_grad_() for name, x in tensors.items() if name != mapped}

    def one(x: Tensor) -> tuple[Tensor, Tensor]:
        y, last = OP(**shared, **{mapped: x}, backend="associative")
        return y, last

    together = vmap(one)(stacked)
    apart = [torch.stack(parts) for parts in zip(*map(one, stacked.unbind()), strict=True)]
    leaves = [stacked, *shared.values()]
    gradients = [
        torch.autograd.grad([y.square().sum() for y in outputs], leaves, allow_unused=True)
        for outputs in (together, apart)
    ]
    for mine, theirs in zip((*together, *gradients[0]), (*apart, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)
