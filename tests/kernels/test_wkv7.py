"""RWKV-7's time mixing: its definition as products of matrices, fla's reference, chunks, decays."""

from collections.abc import Callable

import pytest
import torch
from archsearch_kernels import Sizes, family
from peers import fla_reference
from torch import Tensor
from torch.func import vmap

OP, BACKENDS = family("wkv7").op, tuple(family("wkv7").backends)
EXACT = 1e-10
"""fp64 has 16 digits; a few hundred terms in another order lose two or three."""


def inputs(tokens: int, state: bool = True, free: bool = False) -> dict[str, Tensor]:
    """Inputs of a check. `free`: a and b have nothing to do with each other, as RWKV-7's have."""
    sizes = Sizes(batch=2, tokens=tokens, heads=2, head_size=4, state=state, seed=tokens)
    tensors = dict(family("wkv7").make_inputs(sizes).tensors)
    if free:
        generator = torch.Generator().manual_seed(tokens)
        for name in ("a_BTHK", "b_BTHK"):
            x = torch.randn(tensors[name].shape, generator=generator, dtype=torch.float64)
            tensors[name] = 0.5 * x
    return tensors


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


def textbook(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    state_BHVK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Whole transition matrices, for one sequence and head after the other."""
    B, T, H, V = v_BTHV.shape
    rows, lasts = [], []
    for b in range(B):
        for h in range(H):
            empty = v_BTHV.new_zeros(V, k_BTHK.shape[-1])
            S = empty if state_BHVK is None else state_BHVK[b, h]
            for t in range(T):
                G = torch.diag(log_decay_BTHK[b, t, h].exp())
                S = S @ (G + torch.outer(a_BTHK[b, t, h], b_BTHK[b, t, h]))
                S = S + torch.outer(v_BTHV[b, t, h], k_BTHK[b, t, h])
                rows.append(S @ r_BTHK[b, t, h])
            lasts.append(S)
    y = torch.stack(rows).view(B, H, T, V).transpose(1, 2)
    return y, torch.stack(lasts).view(B, H, V, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 19])
def test_every_backend_is_the_textbook_loop(
    backend: str, state: bool, free: bool, tokens: int
) -> None:
    tensors = inputs(tokens, state, free)
    found = results(OP, tensors, backend=backend)
    for mine, theirs in zip(found, results(textbook, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33, 47, 101])
def test_chunks_join_as_if_there_were_none(tokens: int, state: bool, keep_state: bool) -> None:
    tensors = inputs(tokens, state)
    found = results(OP, tensors, keep_state=keep_state, backend="chunked")
    expected = results(OP, tensors, keep_state=keep_state, backend="reference")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(1,) * 20, (33, 1, 18)])
def test_segments_give_what_one_pass_gives(backend: str, cuts: tuple[int, ...]) -> None:
    tensors = inputs(sum(cuts))
    whole, last = OP(**tensors, backend=backend)
    state, parts = tensors.pop("state_BHVK"), []
    for segment in zip(*(x.split(cuts, 1) for x in tensors.values()), strict=True):
        named = dict(zip(tensors, segment, strict=True))
        part, state = OP(**named, state_BHVK=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(state, last, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_from_none_to_all_give_numbers(backend: str, dtype: torch.dtype) -> None:
    """Decays of exp(-1e4), exp(-1e-6) and 0 in turns: no exponent may overflow, no sum of
    logarithms may lose the small ones next to the large."""
    tensors = inputs(90)
    log_decay = tensors["log_decay_BTHK"]
    steps = torch.arange(log_decay.numel()).view(log_decay.shape) * 7 % 41
    log_decay = -(10.0 ** (steps.double() / 4 - 6))
    tensors["log_decay_BTHK"] = log_decay.masked_fill(steps == 40, -torch.inf)
    wide = ("log_decay_BTHK", "state_BHVK")
    rounded = {name: x.float() if name in wide else x.to(dtype) for name, x in tensors.items()}
    exact = results(OP, {name: x.double() for name, x in rounded.items()}, backend="reference")
    for mine, truth in zip(results(OP, rounded, backend=backend), exact, strict=True):
        error = (mine.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
        # Some hundred roundings of fp32, and one of bf16 where that is the dtype of the result.
        assert error < 1e-5 + torch.finfo(mine.dtype).eps / 2


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_chunks_solve_repeated_keys_without_decay(rate: float) -> None:
    """The hardest system: one key for all tokens, and no decay. Corrected in full, only the last
    value remains; not corrected at all, the sum of all of them does."""
    tensors = {name: x.float() for name, x in inputs(64, state=False).items()}
    key = -tensors["a_BTHK"][:, :1].expand_as(tensors["a_BTHK"])
    tensors |= {"r_BTHK": key, "k_BTHK": key, "a_BTHK": -key, "b_BTHK": rate * key}
    tensors["log_decay_BTHK"] = torch.zeros_like(tensors["log_decay_BTHK"])
    y, _ = OP(**tensors, backend="chunked")
    v = tensors["v_BTHV"]
    expected = v if rate else v.cumsum(1)
    torch.testing.assert_close(y, expected, atol=2e-5, rtol=2e-5)  # 64 sums of fp32, up to 30


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mapped", ["k_BTHK", "log_decay_BTHK", "a_BTHK", "state_BHVK"])
def test_one_mapped_input_is_enough(backend: str, mapped: str) -> None:
    """Members of a population may share everything but one input."""
    tensors = inputs(35)
    own = tensors.pop(mapped)
    members = torch.stack([own, 0.5 * own])

    def one(x: Tensor) -> tuple[Tensor, Tensor]:
        y, last = OP(**tensors, **{mapped: x}, backend=backend)
        return y, last

    apart = [torch.stack(parts) for parts in zip(*map(one, members.unbind()), strict=True)]
    for mine, theirs in zip(vmap(one)(members), apart, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


CLOSE = {"atol": 2e-5, "rtol": 2e-5}
"""fla's references compute in fp32 whatever they are given: 200 roundings of size 6e-8."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("peer", "tokens"), [("dplr_recurrence", 37), ("dplr_chunkwise", 64)])
def test_every_backend_is_the_reference_of_fla(peer: str, tokens: int, backend: str) -> None:
    """Theirs scale r by K^-1/2; heads come before tokens; a memory is K x V.

    Their chunks are of 32 tokens and sum logarithms in fp32, so decays are mild here.
    """
    tensors = {name: x.float() for name, x in inputs(tokens).items()}
    tensors["log_decay_BTHK"] = -0.6 * torch.rand(tensors["log_decay_BTHK"].shape)

    def scaled(r_BTHK: Tensor, **others: Tensor) -> object:
        return OP(r_BTHK * r_BTHK.shape[-1] ** -0.5, **others, backend=backend)

    def theirs(
        r_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        log_decay_BTHK: Tensor,
        a_BTHK: Tensor,
        b_BTHK: Tensor,
        state_BHVK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ordered = (r_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK, log_decay_BTHK)
        y_BHTV, memory_BHKV = getattr(fla_reference("generalized_delta_rule/dplr"), peer)(
            *(x.transpose(1, 2) for x in ordered), initial_state=state_BHVK.mT
        )
        return y_BHTV.transpose(1, 2), memory_BHKV.mT

    for mine, other in zip(results(scaled, tensors), results(theirs, tensors), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
