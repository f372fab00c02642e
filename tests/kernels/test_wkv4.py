"""RWKV-4's time mixing: its definition written out a second time, segments, and extreme inputs."""

from collections.abc import Callable

import pytest
import torch
from archsearch_kernels import Sizes, family
from torch import Tensor
from torch.func import vmap

OP, BACKENDS = family("wkv4").op, tuple(family("wkv4").backends)
STATE = ("numerator_BC", "denominator_BC", "exponent_BC")
EXACT = 1e-10
"""fp64 has 16 digits; a few hundred terms in another order lose two or three."""


def inputs(tokens: int, state: bool = False) -> dict[str, Tensor]:
    sizes = Sizes(batch=2, tokens=tokens, heads=1, head_size=5, state=state)
    return dict(family("wkv4").make_inputs(sizes).tensors)


def textbook(
    k_BTC: Tensor,
    v_BTC: Tensor,
    log_decay_C: Tensor,
    bonus_C: Tensor,
    numerator_BC: Tensor | None = None,
    denominator_BC: Tensor | None = None,
    exponent_BC: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """No recurrence and no care for overflow: each output as a quotient of sums over the tokens
    before it; then the numerator and the denominator after the last."""

    def sums(t: int) -> tuple[Tensor, Tensor]:
        a = b = torch.zeros_like(k_BTC[:, 0])
        for s in range(t):
            weight = (k_BTC[:, s] + (t - 1 - s) * log_decay_C).exp()
            a, b = a + weight * v_BTC[:, s], b + weight
        if exponent_BC is not None:
            assert numerator_BC is not None and denominator_BC is not None
            weight = (exponent_BC + t * log_decay_C).exp()
            a, b = a + weight * numerator_BC, b + weight * denominator_BC
        return a, b

    outputs = []
    for t in range(k_BTC.shape[1]):
        a, b = sums(t)
        now = (bonus_C + k_BTC[:, t]).exp()
        outputs.append((a + now * v_BTC[:, t]) / (b + now))
    return torch.stack(outputs, 1), *sums(k_BTC.shape[1])


def plain(*, backend: str, **tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The op with its state as two numbers, as how an exponent is split off is its own affair."""
    y, numerator, denominator, exponent = OP(**tensors, backend=backend)
    return y, numerator * exponent.exp(), denominator * exponent.exp()


def results(
    op: Callable[..., tuple[Tensor, ...]], tensors: dict[str, Tensor], **options: str
) -> list[Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    outputs = list(op(**leaves, **options))
    weights = [torch.sin(1 + torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), weights)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_every_backend_is_the_textbook_quotient(backend: str, state: bool, tokens: int) -> None:
    tensors = inputs(tokens, state)
    found = results(plain, tensors, backend=backend)
    for mine, theirs in zip(found, results(textbook, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 63, 65, 129, 200])
def test_scan_is_the_loop(tokens: int, state: bool) -> None:
    """The state too, number by number: both split off the largest exponent."""
    tensors = inputs(tokens, state)
    found = results(OP, tensors, backend="associative")
    for mine, theirs in zip(found, results(OP, tensors, backend="reference"), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(1,) * 20, (65, 1, 34)])
def test_segments_give_what_one_pass_gives(backend: str, cuts: tuple[int, ...]) -> None:
    tensors = inputs(sum(cuts), state=True)
    whole, *last = OP(**tensors, backend=backend)
    fixed = {name: x for name, x in tensors.items() if name not in ("k_BTC", "v_BTC")}
    parts = []
    for k, v in zip(tensors["k_BTC"].split(cuts, 1), tensors["v_BTC"].split(cuts, 1), strict=True):
        part, *state = OP(k, v, **fixed, backend=backend)
        fixed |= dict(zip(STATE, state, strict=True))
        parts.append(part)
    for mine, theirs in zip((torch.cat(parts, 1), *state), (whole, *last), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_are_the_empty_state_whatever_the_keys(backend: str) -> None:
    """Exponent 0 of an empty state would be a token of weight 1 next to keys of -80."""
    tensors = inputs(9)
    tensors["k_BTC"] -= 80
    zeros = dict.fromkeys(STATE, torch.zeros(2, 5, dtype=torch.float64))
    empty, given = (OP(**tensors, **state, backend=backend) for state in ({}, zeros))
    for mine, theirs in zip(given, empty, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [-300.0, 300.0, 0.0])
def test_large_keys_and_any_decay_give_the_right_numbers(backend: str, keys: float) -> None:
    """exp(300) is beyond fp32 and within fp64, and decays run from none to all at once."""
    tensors = inputs(65)
    tensors["k_BTC"] = (20 * tensors["k_BTC"] + keys).float().double()
    tensors["log_decay_C"] = -torch.tensor([0.0, 1e-6, 0.5, 30.0, 1e4], dtype=torch.float64)
    exact, *_ = textbook(**tensors)
    narrow = {name: x.float() for name, x in tensors.items()}
    y, *gradients = results(lambda **x: OP(**x, backend=backend)[:1], narrow)
    # Exponents of 500, and decays of 30 times 65 tokens: fp32 keeps them to 1e-4 at worst.
    torch.testing.assert_close(y.double(), exact, atol=2e-4, rtol=0)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("log_decay", [-1e30, -torch.inf])
def test_decay_to_nothing_leaves_the_token_before(backend: str, log_decay: float) -> None:
    tensors = {name: x.float() for name, x in inputs(33).items()}
    tensors["log_decay_C"] = torch.full((5,), log_decay)
    y, *gradients = results(lambda **x: OP(**x, backend=backend)[:1], tensors)
    k, v = tensors["k_BTC"], tensors["v_BTC"]
    before = torch.stack((k[:, :-1], k[:, 1:] + tensors["bonus_C"])).softmax(0)
    expected = before[0] * v[:, :-1] + before[1] * v[:, 1:]
    torch.testing.assert_close(y[:, 1:], expected, atol=1e-5, rtol=1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("mapped", ["k_BTC", "log_decay_C", "exponent_BC"])
def test_one_mapped_input_is_enough(mapped: str) -> None:
    """Under vmap an input without the mapped dimension is shared, and its gradients add up."""
    tensors = inputs(9, state=True)
    stacked = torch.stack([tensors[mapped], 0.5 * tensors[mapped]]).requires_grad_()
    shared = {name: x.clone().requires_grad_() for name, x in tensors.items() if name != mapped}

    def one(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(OP(**shared, **{mapped: x}, backend="associative"))

    together = vmap(one)(stacked)
    apart = [torch.stack(parts) for parts in zip(*map(one, stacked.unbind()), strict=True)]
    leaves = [stacked, *shared.values()]
    gradients = [
        torch.autograd.grad([y.square().sum() for y in outputs], leaves)
        for outputs in (together, apart)
    ]
    for mine, theirs in zip((*together, *gradients[0]), (*apart, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)
