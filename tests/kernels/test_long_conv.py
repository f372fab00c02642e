"""The long convolution: its definition written out a second time, segments, and causality."""

from collections.abc import Callable

import pytest
import torch
from archsearch_kernels import Sizes, family
from torch import Tensor

OP, BACKENDS = family("long_conv").op, tuple(family("long_conv").backends)
EXACT = 1e-10
"""fp64 has 16 digits; a few hundred terms in another order lose two or three."""


def textbook(x_BTC: Tensor, filter_JC: Tensor, tail_BPC: Tensor | None = None) -> Tensor:
    """Every term on its own."""
    B, T, C = x_BTC.shape
    J = filter_JC.shape[0]
    y = torch.zeros(B, T, C, dtype=torch.float64)
    for t in range(T):
        for j in range(J):
            if t >= j:
                y[:, t] = y[:, t] + filter_JC[j] * x_BTC[:, t - j]
            elif tail_BPC is not None:
                y[:, t] = y[:, t] + filter_JC[j] * tail_BPC[:, t - j]  # from its end
    return y


def results(
    op: Callable[..., object], tensors: dict[str, Tensor], **options: object
) -> list[Tensor]:
    inputs = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    found = op(**inputs, **options)
    y = found[0] if isinstance(found, tuple) else found
    assert isinstance(y, Tensor)
    weights = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
    return [y, *torch.autograd.grad(y, list(inputs.values()), weights)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("tokens", "taps"), [(1, 4), (5, 2), (70, 9), (97, 40), (130, 130)])
def test_every_backend_is_the_textbook_sum(
    backend: str, state: bool, tokens: int, taps: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"x_BTC": normal(2, tokens, 3), "filter_JC": normal(taps, 3)}
    if state:
        tensors["tail_BPC"] = normal(2, taps - 1, 3)
    expected = results(textbook, tensors)
    for mine, theirs in zip(results(OP, tensors, backend=backend), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(1,) * 40, (33, 1, 66), (7, 64, 29)])
def test_segments_give_what_one_pass_gives(backend: str, cuts: tuple[int, ...]) -> None:
    sizes = Sizes(batch=2, tokens=sum(cuts), heads=1, head_size=3, state=True)
    x, taps, tail = family("long_conv").make_inputs(sizes).tensors.values()
    whole, last = OP(x, taps, tail_BPC=tail, backend=backend)
    parts = []
    for segment in x.split(cuts, 1):
        part, tail = OP(segment, taps, tail_BPC=tail, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=EXACT, rtol=EXACT)
    assert torch.equal(tail, last)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", [1, 31, 32, 64, 96, 127, 199])
def test_a_later_token_changes_no_bit_of_an_earlier_output(backend: str, t: int) -> None:
    """Transforms of a whole sequence would."""
    sizes = Sizes(batch=2, tokens=200, heads=1, head_size=3, state=False)
    x, taps = (one.float() for one in family("long_conv").make_inputs(sizes).tensors.values())
    changed = x.clone()
    changed[:, t] += 1e4
    before, _ = OP(x, taps, backend=backend)
    after, _ = OP(changed, taps, backend=backend)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t], after[:, t])


def test_an_impulse_returns_the_filter_and_wraps_nowhere() -> None:
    taps = torch.randn(1000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(1, 1000, 2, dtype=torch.float64)
    x[:, 0] = 1
    y, _ = OP(x, taps, backend="fft")
    torch.testing.assert_close(y[0], taps, atol=1e-12, rtol=1e-12)
    y, _ = OP(x.flip(1), taps, backend="fft")
    assert (y[0, :-1] == 0).all()


def test_no_tail_is_kept_unless_asked_for() -> None:
    x = torch.ones(1, 3, 2)
    assert OP(x, torch.ones(9, 2), keep_state=False, backend="fft")[1] is None
    _, tail = OP(x, torch.ones(5, 2), backend="fft")
    assert tail[0, :, 0].tolist() == [0, 1, 1, 1]
