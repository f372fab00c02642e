"""Backends against their reference, over lengths, head sizes and states, with every gradient."""

import warnings

import pytest
import torch
from archsearch_kernels import Sizes, families, family
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from archsearch.kernel_check import REFERENCE, check

BACKENDS = [
    (one.name, backend)
    for one in families()
    for backend in one.backends_on("cpu")
    if backend != REFERENCE
]
LENGTHS = (1, 7, 33, 64)
HEAD_SIZES = (6, 20)  # no powers of two
EXACT = 1e-10
"""fp64 has 16 digits; a hundred terms of size 1 in another order lose two or three."""


def run(name: str, backend: str, sizes: Sizes) -> list[Tensor]:
    """Outputs and the gradient of every input, in fp64."""
    call = family(name).make_inputs(sizes)
    inputs = {key: x.clone().requires_grad_() for key, x in call.tensors.items()}
    result = family(name).op(**inputs, **call.options, backend=backend)
    outputs = list(result) if isinstance(result, tuple) else [result]
    weights = [torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), weights)]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_backend_is_exact_in_fp64(
    name: str, backend: str, tokens: int, head_size: int, state: bool
) -> None:
    sizes = Sizes(batch=2, tokens=tokens, heads=2, head_size=head_size, state=state)
    for found, expected in zip(run(name, backend, sizes), run(name, REFERENCE, sizes), strict=True):
        torch.testing.assert_close(found, expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backend_rounds_no_more_than_its_reference(
    name: str, backend: str, dtype: torch.dtype
) -> None:
    verdict = check(family(name), backend, "cpu", HEAD_SIZES, dtype)
    assert verdict.ok, verdict


def test_linear_attention_is_exact_across_chunks() -> None:
    sizes = Sizes(batch=1, tokens=600, heads=1, head_size=3, state=True)
    found, expected = (run("linear_attention", name, sizes) for name in ("chunked", REFERENCE))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)  # 600 tokens of sums


RECURRENT = {
    "linear_attention": ("memory_BHFV", "normaliser_BHF"),
    "gated_delta": ("state_BHVK",),
    "short_conv": ("tail_BPC",),
}
TIMED = {"linear_attention": 3, "gated_delta": 5, "short_conv": 2}
"""How many of an op's first tensors run along time."""


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in RECURRENT for backend in family(name).backends_on("cpu")],
)
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5), state=st.booleans())
def test_segments_give_what_one_pass_gives(
    name: str, backend: str, cuts: list[int], state: bool
) -> None:
    one = family(name)
    sizes = Sizes(batch=2, tokens=sum(cuts), heads=2, head_size=3, state=state)
    tensors = dict(one.make_inputs(sizes).tensors)
    whole, *final = one.op(**tensors, backend=backend)
    timed = dict(list(tensors.items())[: TIMED[name]])
    fixed = {key: x for key, x in tensors.items() if key not in timed}
    parts, start = [], 0
    for cut in cuts:
        segment = {key: x[:, start : start + cut] for key, x in timed.items()}
        part, *after = one.op(**segment, **fixed, backend=backend)
        fixed |= dict(zip(RECURRENT[name], after, strict=True))
        parts.append(part)
        start += cut
    for found, expected in zip((torch.cat(parts, 1), *after), (whole, *final), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)  # 200 tokens of sums


@pytest.mark.parametrize("backend", family("sliding_window").backends_on("cpu"))
@settings(max_examples=12, deadline=None)
@given(window=st.integers(1, 70), older=st.integers(0, 9), t=st.integers(0, 69))
def test_window_shows_exactly_its_tokens(backend: str, window: int, older: int, t: int) -> None:
    """The oldest visible key matters to query t, and the one before it does not."""
    op, tokens = family("sliding_window").op, 70
    generator = torch.Generator().manual_seed(window)
    q, k, v = torch.randn(
        3, 1, tokens + older, 1, 4, dtype=torch.float64, generator=generator
    ).unbind()
    q = q[:, older:]
    before = op(q, k, v, window=window, backend=backend)[0, t]
    for distance, matters in ((window - 1, True), (window, False)):
        key = older + t - distance
        if key >= 0:
            changed = v.clone()
            changed[:, key] += 1.0
            after = op(q, k, changed, window=window, backend=backend)[0, t]
            assert torch.equal(after, before) is not matters


@pytest.mark.parametrize(
    ("name", "backend"),
    [one for one in BACKENDS if one[0] != "head_loss"],  # takes the stacked tensors of all members
)
def test_population_is_mapped_without_a_loop(name: str, backend: str) -> None:
    one = family(name)
    calls = [
        one.make_inputs(Sizes(batch=2, tokens=9, heads=2, head_size=4, state=False, seed=seed))
        for seed in range(3)
    ]
    stacked = {
        key: torch.stack([call.tensors[key] for call in calls]).requires_grad_()
        for key in calls[0].tensors
    }

    def member(tensors: dict[str, Tensor]) -> Tensor:
        result = one.op(**tensors, **calls[0].options, backend=backend)
        y: Tensor = result[0] if isinstance(result, tuple) else result
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it falls back to a loop
        together = vmap(member)(stacked)
    apart = torch.stack([member({k: x[m] for k, x in stacked.items()}) for m in range(3)])
    torch.testing.assert_close(together, apart, atol=EXACT, rtol=EXACT)
    inputs = list(stacked.values())
    for mapped, separate in zip(
        torch.autograd.grad(together.square().sum(), inputs),
        torch.autograd.grad(apart.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mapped, separate, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("rows", [1, 2], ids=lambda rows: f"mask of {rows} rows")
@pytest.mark.parametrize("in_dims", [(0, None, None, None), (0, 0, 2, 0), (None, 0, 3, 2)])
def test_attention_op_folds_any_mapping_with_a_mask(
    in_dims: tuple[int | None, ...], rows: int
) -> None:
    from archsearch_kernels.dot_product import dot_product_attention

    generator = torch.Generator().manual_seed(0)
    shape = (2, 5, 2, 4)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1] = torch.ones(5, 5).triu(-2)
    inputs = [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(3)]
    inputs.append(mask[:rows])
    mapped = [
        x if dim is None else torch.stack([x, x.roll(1, 0), x.tril()], dim)
        for x, dim in zip(inputs, in_dims, strict=True)
    ]
    found = vmap(dot_product_attention, in_dims=in_dims)(*mapped)
    for m in range(3):
        one = [x if d is None else x.select(d, m) for x, d in zip(mapped, in_dims, strict=True)]
        expected = dot_product_attention(*one)
        torch.testing.assert_close(found[m], expected, atol=EXACT, rtol=EXACT)


def delta_inputs(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = Sizes(batch=1, tokens=tokens, heads=1, head_size=8, state=False)
    return dict(family("gated_delta").make_inputs(sizes).cast(dtype, "cpu").tensors)


@pytest.mark.parametrize("log_decay", [-30.0, -1000.0, -1e30, -torch.inf])
def test_chunks_survive_decay_that_empties_the_memory(log_decay: float) -> None:
    """After a decay to nothing, a sequence starts anew; its gradients are numbers."""
    op, tensors = family("gated_delta").op, delta_inputs(65, torch.float32)
    tensors["log_decay_BTH"][:, 40] = log_decay
    inputs = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    y, _ = op(**inputs, backend="chunked")
    anew, _ = op(**{name: x[:, 40:] for name, x in tensors.items()}, backend="chunked")
    torch.testing.assert_close(y[:, 40:], anew, atol=1e-5, rtol=1e-5)  # exp(-30) of the past
    for gradient in torch.autograd.grad(y.sum(), list(inputs.values())):
        assert gradient.isfinite().all()


def test_chunks_keep_weak_decays_after_a_strong_one() -> None:
    """Sums of logarithms reach -1e5 here; a difference of 0.1 must survive them."""
    op, tensors = family("gated_delta").op, delta_inputs(64, torch.float64)
    tensors["log_decay_BTH"].fill_(-0.1)[:, ::8] = -900.0
    expected, _ = op(**tensors, backend="reference")
    narrow = {name: x.float() for name, x in tensors.items()}
    found, _ = op(**narrow, backend="chunked")
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_chunks_solve_repeated_keys_at_full_strength() -> None:
    """The hardest system: every key the same, beta 1, no decay. Only the last value remains."""
    op, tensors = family("gated_delta").op, delta_inputs(64, torch.float32)
    key = tensors["k_BTHK"][:, :1]
    tensors |= {
        "k_BTHK": key.expand_as(tensors["k_BTHK"]),
        "q_BTHK": key.expand_as(tensors["k_BTHK"]),
        "log_decay_BTH": torch.zeros_like(tensors["log_decay_BTH"]),
        "beta_BTH": torch.ones_like(tensors["beta_BTH"]),
    }
    y, _ = op(**tensors, backend="chunked")
    torch.testing.assert_close(y, tensors["v_BTHV"], atol=1e-5, rtol=1e-5)  # 32 sums of fp32


@pytest.mark.parametrize("backend", family("attention").backends)
def test_attention_survives_large_scores(backend: str) -> None:
    q = torch.full((1, 4, 1, 4), 100.0)
    y = family("attention").op(q, q, q, backend=backend)
    torch.testing.assert_close(y, q)


@pytest.mark.parametrize("backend", family("attention").backends)
def test_grouped_heads_equal_repeated_ones(backend: str) -> None:
    sizes = Sizes(batch=2, tokens=6, heads=4, head_size=3, state=False)
    q, k, v = (x.requires_grad_() for x in family("attention").make_inputs(sizes).tensors.values())
    op = family("attention").op
    grouped = op(q, k, v, backend=backend)
    repeated = op(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), backend=backend)
    for mine, theirs in zip(
        (grouped, *torch.autograd.grad(grouped.square().sum(), (q, k, v))),
        (repeated, *torch.autograd.grad(repeated.square().sum(), (q, k, v))),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)
