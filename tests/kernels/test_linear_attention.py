"""Linear attention: every map and switch against a textbook loop, and what each map is for.

The loop shares no code with the kernels: it weighs values by scores, without features or states.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from archsearch_kernels import family
from archsearch_kernels.linear_attention import feature_size, linear_attention, prefix_state
from archsearch_kernels.linear_attention.chunked import CHUNK
from archsearch_kernels.linear_attention.feature_maps import orthogonal_projection, performer
from archsearch_kernels.linear_attention.taylor import full_features, similarity
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

EXACT = 1e-10
"""fp64 has 16 digits; a hundred terms of size 1 in another order lose two or three."""

MAX_LEN = 20
"""Positions that cosformer tells apart here: fewer than the longest sequence has tokens."""

MAPS = ("taylor", "taylor_full", "elu", "relu", "performer", "cosformer")
BACKENDS = family("linear_attention").backends_on("cpu")


def kernel_of(feature_map: str, q: Tensor, k: Tensor, i: int, j: int, rows: Tensor) -> Tensor:
    """phi(q) . phi(k) of one query at i and one key at j."""
    if feature_map.startswith("taylor"):
        t = q @ k / math.sqrt(len(q))
        return 1 + t + t * t / 2
    if feature_map.endswith("elu") and feature_map != "relu":
        return (F.elu(q) + 1) @ (F.elu(k) + 1)
    if feature_map == "performer":
        root = len(q) ** 0.25
        return torch.stack(
            [
                torch.exp(row @ (q + k) / root - (q @ q + k @ k) / (2 * root**2)) / len(rows)
                for row in rows
            ]
        ).sum()
    product = q.clamp(min=0) @ k.clamp(min=0)
    if feature_map == "relu":
        return product
    distance = min(i, MAX_LEN - 1) - min(j, MAX_LEN - 1)
    return product * math.cos(math.pi / 2 * distance / MAX_LEN)


def textbook(
    feature_map: str,
    tensors: dict[str, Tensor],
    rows: Tensor,
    normalise: bool,
    log_decay_H: Tensor | None,
    exists_BT: Tensor | None,
) -> Tensor:
    q, k, v = tensors.values()
    B, T, H, _ = q.shape
    y = []
    for b in range(B):
        for i in range(T):
            for h in range(H):
                total, weights = v.new_zeros(v.shape[-1]), v.new_zeros(())
                for j in range(i + 1):
                    if exists_BT is not None and not exists_BT[b, j]:
                        continue
                    weight = kernel_of(feature_map, q[b, i, h], k[b, j, h], i, j, rows)
                    kept = 1 if log_decay_H is None else log_decay_H[h].exp() ** (i - j)
                    total, weights = total + kept * weight * v[b, j, h], weights + weight
                y.append(total / (weights + 1e-6) if normalise else total)
    return torch.stack(y).view(B, T, H, -1)


def inputs(tokens: int, batch: int = 2, size: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(
        3, batch, tokens, 2, size, generator=generator, dtype=torch.float64
    ).unbind()
    return {"q_BTHK": q, "k_BTHK": k, "v_BTHV": v[..., :-1]}


def rows_of(size: int = 5) -> Tensor:
    return torch.randn(7, size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def needs_of(feature_map: str, tokens: int, start: int = 0) -> dict[str, object]:
    """What a map is given besides queries and keys."""
    if feature_map == "performer":
        return {"projection_PK": rows_of()}
    if feature_map == "cosformer":
        return {"position_BT": torch.arange(start, start + tokens)[None], "max_len": MAX_LEN}
    return {}


def gradients(
    op: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor]
) -> list[Tensor]:
    """The result, and the gradient of each tensor."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    y = op(leaves)
    weights = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
    return [y, *torch.autograd.grad(y, list(leaves.values()), weights)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("switch", ["plain", "no normaliser", "decay", "padding"])
def test_output_and_gradients_are_those_of_the_textbook(
    switch: str, feature_map: str, backend: str
) -> None:
    tokens, normalise, decay, exists = 6, switch != "no normaliser", None, None
    if switch == "decay":
        decay = torch.tensor([-0.1, -1.5], dtype=torch.float64)
    if switch == "padding":
        exists = torch.tensor([[False, False, True, True, False, True], [True] * 6])
    found = gradients(
        lambda given: linear_attention(
            **given,
            feature_map=feature_map,
            log_decay_H=decay,
            exists_BT=exists,
            normalise=normalise,
            backend=backend,
            **needs_of(feature_map, tokens),
        )[0],
        inputs(tokens),
    )
    expected = gradients(
        lambda given: textbook(feature_map, given, rows_of(), normalise, decay, exists),
        inputs(tokens),
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("feature_map", MAPS)
@settings(max_examples=6, deadline=None)
@given(
    cuts=st.lists(st.sampled_from((1, 5, CHUNK, CHUNK + 3)), min_size=1, max_size=2),
    normalise=st.booleans(),
    decays=st.booleans(),
    padded=st.booleans(),
)
def test_backends_continue_over_chunks_as_the_reference_does(
    backend: str, feature_map: str, cuts: list[int], normalise: bool, decays: bool, padded: bool
) -> None:
    """Segments of odd lengths, some longer than a chunk: outputs and the last state."""
    tokens = sum(cuts)
    tensors = inputs(tokens, batch=1)
    decay = torch.tensor([-0.02, -0.5], dtype=torch.float64) if decays else None
    exists = torch.arange(tokens)[None] % 3 > 0 if padded else None

    def run(backend: str, lengths: list[int]) -> list[Tensor]:
        memory = normaliser = None
        parts, start = [], 0
        for length in lengths:
            y, memory, normaliser = linear_attention(
                **{name: x[:, start : start + length] for name, x in tensors.items()},
                feature_map=feature_map,
                log_decay_H=decay,
                exists_BT=None if exists is None else exists[:, start : start + length],
                normalise=normalise,
                memory_BHFV=memory,
                normaliser_BHF=normaliser,
                backend=backend,
                **needs_of(feature_map, length, start),
            )
            parts.append(y)
            start += length
        assert memory is not None and (normaliser is not None) == normalise
        return [torch.cat(parts, 1), memory, *([] if normaliser is None else [normaliser])]

    for found, expected in zip(run(backend, cuts), run("reference", [tokens]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)  # 500 tokens of sums


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_the_full_taylor_map_has_the_same_kernel(size: int) -> None:
    q, k = torch.randn(2, 50, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = (full_features(q) * full_features(k)).sum(-1)
    expected = similarity((q * k).sum(-1) / math.sqrt(size))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert full_features(q).shape[-1] == feature_size("taylor_full", size)


@pytest.mark.parametrize("size", [4, 16])
def test_random_features_estimate_the_softmax_kernel(size: int) -> None:
    """Each row does by itself: 20,000 of them on average, within 4 standard errors of their mean.

    Rows of a block are orthogonal, which makes the mean more exact than that.
    """
    count = 20_000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        q, k = (0.6 * x for x in torch.randn(2, 1, size, dtype=torch.float64).unbind())
        rows = orthogonal_projection(count, size).double()
    found = performer(q, rows) * performer(k, rows) * count
    expected = (q * k).sum().div(math.sqrt(size)).exp()
    allowed = 4 * found.std() / count**0.5
    assert (found.mean() - expected).abs() < allowed
    assert allowed < 0.07 * expected  # else the bound above says little


def test_random_rows_are_orthogonal_in_blocks_and_lie_in_every_direction() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = orthogonal_projection(11, 4).double()
        many = orthogonal_projection(4000, 4).double()
    assert rows.shape == (11, 4)
    for block in (rows[:4], rows[4:8], rows[8:]):
        products = block @ block.T
        assert (products - products.diagonal().diag()).abs().max() < 1e-5  # drawn in fp32
    # Four standard errors of 1 / sqrt(4000), for means 0 and mean squares 1 (variance 2).
    assert many.mean(0).abs().max() < 4 / 4000**0.5
    assert (many.square().mean(0) - 1).abs().max() < 4 * (2 / 4000) ** 0.5


def test_cosformer_ends_where_its_positions_do() -> None:
    """Past them all tokens are at one place, and no weight is below 0 at any distance."""
    tensors = {name: x.abs() for name, x in inputs(3 * MAX_LEN).items()}

    def weights(start: int) -> Tensor:
        values = torch.eye(3 * MAX_LEN, dtype=torch.float64)[None, :, None].expand(2, -1, 2, -1)
        return linear_attention(
            **{**tensors, "v_BTHV": values},
            feature_map="cosformer",
            normalise=False,
            backend="reference",
            **needs_of("cosformer", 3 * MAX_LEN, start),
        )[0]

    assert weights(0).min() >= 0
    relu, _, _ = linear_attention(**tensors, feature_map="relu", backend="reference")
    far, _, _ = linear_attention(
        **tensors,
        feature_map="cosformer",
        backend="reference",
        **needs_of("cosformer", 3 * MAX_LEN, 10 * MAX_LEN),
    )
    torch.testing.assert_close(far, relu, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature_map", ["relu", "cosformer"])
def test_a_query_that_meets_no_key_reads_nothing(feature_map: str, backend: str) -> None:
    """Every feature is 0: the output is 0, and so is every gradient of the query."""
    tensors = {name: -x.abs() for name, x in inputs(5).items()}
    found, *slopes = gradients(
        lambda given: linear_attention(
            **given, feature_map=feature_map, backend=backend, **needs_of(feature_map, 5)
        )[0],
        tensors,
    )
    assert not found.any()
    assert not any(slope.any() for slope in slopes)


def test_elu_is_above_zero_where_the_usual_form_rounds_to_zero() -> None:
    x = torch.full((1, 1, 1, 4), -40.0)
    assert not (F.elu(x) + 1).any()
    y, _, normaliser = linear_attention(
        x, x, torch.ones(1, 1, 1, 2), feature_map="elu", backend="reference"
    )
    assert normaliser is not None and (normaliser > 0).all()
    assert y.isfinite().all()


@pytest.mark.parametrize("feature_map", ["taylor", "taylor_full", "elu", "relu"])
def test_prefix_state_is_what_the_tokens_leave(feature_map: str) -> None:
    tensors = inputs(9)
    _, memory, normaliser = linear_attention(
        **tensors, feature_map=feature_map, backend="reference"
    )
    _, k, v = tensors.values()
    found = prefix_state(k, v, feature_map=feature_map)
    for mine, theirs in zip(found, (memory, normaliser), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize(
    ("feature_map", "sentence"),
    [("performer", "needs projection_PK"), ("cosformer", "needs position_BT and max_len")],
)
def test_a_map_that_lacks_what_it_needs_is_refused(feature_map: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        linear_attention(**inputs(2), feature_map=feature_map, backend="reference")
    with pytest.raises(ValueError, match=sentence):
        prefix_state(*list(inputs(2).values())[1:], feature_map=feature_map)
