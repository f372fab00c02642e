"""Gated linear attention: its definition as a sum, fla's references, segments, extreme decays."""

from collections.abc import Callable

import pytest
import torch
from archsearch_kernels import family
from peers import fla_reference
from torch import Tensor
from torch.func import vmap

OP, BACKENDS = family("gated_linear").op, tuple(family("gated_linear").backends)
FORMS = ("channel", "head", "head, shared keys")
"""Who has a decay of its own, and who a query and a key."""
EXACT = 1e-10
"""fp64 has 16 digits; a few hundred terms in another order lose two or three."""


def inputs(form: str, tokens: int, state: bool = True, heads: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    B, K, V = 2, 4, 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    G, R = 1 if "shared" in form else heads, K if form == "channel" else 1
    tensors = {
        "q_BTGK": normal(B, tokens, G, K),
        "k_BTGK": normal(B, tokens, G, K),
        "v_BTHV": normal(B, tokens, heads, V),
        "log_decay_BTHR": -normal(B, tokens, heads, R).mul(2).exp(),
    }
    return tensors | ({"state_BHKV": normal(B, heads, K, V)} if state else {})


def textbook(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHR: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """No recurrence: the memory after a token is what is left of every outer product before."""
    B, T, H, V = v_BTHV.shape
    K = q_BTGK.shape[-1]
    q, k = q_BTGK.expand(B, T, H, K), k_BTGK.expand(B, T, H, K)
    decay = log_decay_BTHR.expand(B, T, H, K).exp()
    rows, lasts = [], []
    for b in range(B):
        for h in range(H):
            S = q.new_zeros(K, V)
            for t in range(T):
                S = q.new_zeros(K, V) if state_BHKV is None else state_BHKV[b, h]
                S = torch.diag(decay[b, : t + 1, h].prod(0)) @ S
                for j in range(t + 1):
                    left = torch.diag(decay[b, j + 1 : t + 1, h].prod(0))
                    S = S + left @ torch.outer(k[b, j, h], v_BTHV[b, j, h])
                rows.append(S.T @ q[b, t, h])
            lasts.append(S)
    y = torch.stack(rows).view(B, H, T, V).transpose(1, 2)
    return y, torch.stack(lasts).view(B, H, K, V)


def results(
    op: Callable[..., object], tensors: dict[str, Tensor], **options: object
) -> list[Tensor]:
    """Outputs, and the gradient of every input."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    outputs = [y for y in op(**leaves, **options) if y is not None]  # type: ignore[attr-defined]
    weights = [
        torch.arange(y.numel(), dtype=torch.float64).sin().bfloat16().view(y.shape).to(y)
        for y in outputs  # rounded to bf16, so that every dtype gets the same ones
    ]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), weights)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 18])
def test_every_backend_is_the_textbook_sum(
    backend: str, state: bool, form: str, tokens: int
) -> None:
    tensors = inputs(form, tokens, state)
    found = results(OP, tensors, backend=backend)
    for mine, theirs in zip(found, results(textbook, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [15, 16, 17, 32, 33, 63, 64, 65, 129, 200])
def test_chunks_and_halves_join_as_if_there_were_none(
    form: str, tokens: int, keep_state: bool
) -> None:
    tensors = inputs(form, tokens)
    found = results(OP, tensors, keep_state=keep_state, backend="chunked")
    expected = results(OP, tensors, keep_state=keep_state, backend="reference")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cuts", [(1,) * 20, (65, 1, 34)])
def test_segments_give_what_one_pass_gives(backend: str, form: str, cuts: tuple[int, ...]) -> None:
    tensors = inputs(form, sum(cuts))
    whole, last = OP(**tensors, backend=backend)
    state, parts = tensors.pop("state_BHKV"), []
    for segment in zip(*(x.split(cuts, 1) for x in tensors.values()), strict=True):
        named = dict(zip(tensors, segment, strict=True))
        part, state = OP(**named, state_BHKV=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(state, last, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_from_none_to_all_give_numbers(backend: str, form: str, dtype: torch.dtype) -> None:
    """Decays of exp(-1e4), exp(-1e-6) and 0 in turns: no exponent may overflow, no sum of
    logarithms may lose the small ones next to the large."""
    tensors = inputs(form, 150)
    log_decay = tensors["log_decay_BTHR"]
    steps = torch.arange(log_decay.numel()).view(log_decay.shape) * 7 % 41
    log_decay = -(10.0 ** (steps.double() / 4 - 6))
    tensors["log_decay_BTHR"] = log_decay.masked_fill(steps == 40, -torch.inf)
    rounded = {name: x.to(dtype) if name[0] in "qkv" else x.float() for name, x in tensors.items()}
    exact = results(OP, {name: x.double() for name, x in rounded.items()}, backend="reference")
    for mine, truth in zip(results(OP, rounded, backend=backend), exact, strict=True):
        error = (mine.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
        # Some hundred roundings of fp32, and one of bf16 where that is the dtype of the result.
        assert error < 1e-5 + torch.finfo(mine.dtype).eps / 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mapped", ["k_BTGK", "log_decay_BTHR", "state_BHKV"])
def test_one_mapped_input_is_enough(backend: str, form: str, mapped: str) -> None:
    """Members of a population may share everything but one input."""
    tensors = inputs(form, 35)
    own = tensors.pop(mapped)
    members = torch.stack([own, 0.5 * own])

    def one(x: Tensor) -> tuple[Tensor, Tensor]:
        y, last = OP(**tensors, **{mapped: x}, backend=backend)
        return y, last

    apart = [torch.stack(parts) for parts in zip(*map(one, members.unbind()), strict=True)]
    for mine, theirs in zip(vmap(one)(members), apart, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


def head_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


PEERS: dict[str, tuple[str, Callable[..., object]]] = {
    "gla": (
        "channel",
        lambda q, k, v, g, state: fla_reference("gla").naive_recurrent_gla(
            q, k, v, g, initial_state=state, output_final_state=True
        ),
    ),
    "simple_gla, recurrent": (
        "head",
        lambda q, k, v, g, state: fla_reference("simple_gla").naive_recurrent_simple_gla(
            q, k, v, g.squeeze(-1), initial_state=state, output_final_state=True
        ),
    ),
    "simple_gla, chunks": (
        "head",
        lambda q, k, v, g, state: fla_reference("simple_gla").naive_chunk_simple_gla(
            q, k, v, g.squeeze(-1), initial_state=state, output_final_state=True, chunk_size=8
        ),
    ),
}
"""Name -> our form, and fla's function. They scale queries by K ** -0.5."""

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
"""fla's references compute in fp32 whatever they are given: 200 roundings of size 6e-8."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("peer", PEERS)
def test_every_backend_is_the_reference_of_fla(peer: str, backend: str) -> None:
    form, theirs = PEERS[peer]
    tensors = {name: x.float() for name, x in inputs(form, 21).items()}

    def scaled(q_BTGK: Tensor, **others: Tensor) -> object:
        return OP(q_BTGK * q_BTGK.shape[-1] ** -0.5, **others, backend=backend)

    expected = results(lambda **named: theirs(*named.values()), tensors)
    for mine, other in zip(results(scaled, tensors), expected, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fixed_decays_are_the_retention_of_fla(backend: str) -> None:
    """gamma = 1 - 2^(-5-h), and neither a state to begin with nor one to keep."""
    tensors = {name: x.float() for name, x in inputs("head", 70, state=False, heads=3).items()}
    del tensors["log_decay_BTHR"]
    log_decay_H = torch.log1p(-torch.exp2(-5.0 - torch.arange(3)))

    def retention(q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor) -> tuple[Tensor]:
        q, decay = q_BTGK * q_BTGK.shape[-1] ** -0.5, log_decay_H[:, None].expand(2, 70, 3, 1)
        return (OP(q, k_BTGK, v_BTHV, decay, keep_state=False, backend=backend)[0],)

    def theirs(**named: Tensor) -> tuple[Tensor]:
        y_BHTV = fla_reference("retention").naive_retention(*map(head_first, named.values()))
        return (head_first(y_BHTV),)

    for mine, other in zip(results(retention, tensors), results(theirs, tensors), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
