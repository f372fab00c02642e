"""Linear attention: the contract for every map and switch, and the published code and numbers."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from archsearch_kernels import families
from archsearch_plugins.linear_attention import LinearAttention
from peers import fla_reference
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.mixer import state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}
EXACT = 1e-10
"""fp64 has 16 digits; a hundred terms of size 1 in another order lose two or three."""


class TestFullTaylor(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"compact": False, "feature_dim": 8, "heads": 2}


class TestElu(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"feature_map": "elu"}


class TestRelu(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"feature_map": "relu", "heads": 2}


class TestPerformer(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"feature_map": "performer", "feature_dim": 8, "random_features": 20}


class TestPerformerReference(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"feature_map": "performer", "random_features": 12, "heads": 2}
    backends: ClassVar = REFERENCES


class TestCosformerOfFewPositions(MixerContract):
    """Shorter than the longest sequence, so that later positions count as the last."""

    mixer = "linear_attention"
    fields: ClassVar = {"feature_map": "cosformer", "max_len": 12}


class TestCosformerReference(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"feature_map": "cosformer", "max_len": 64, "heads": 4}
    backends: ClassVar = REFERENCES


class TestWithoutNormaliser(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"normalise": False, "feature_dim": 8}


class TestDecay(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"fixed_decay": True, "feature_dim": 8, "heads": 4}


class TestDecayReference(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"fixed_decay": True, "feature_map": "elu", "heads": 2}
    backends: ClassVar = REFERENCES


class TestHeadMix(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"head_mix": True, "feature_dim": 4, "heads": 4}


class TestEverySwitch(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {
        "feature_map": "cosformer",
        "normalise": False,
        "fixed_decay": True,
        "head_mix": True,
        "heads": 2,
        "max_len": 40,
    }
    backends: ClassVar = {"linear_attention": "quadratic"}


def build(width: int = 24, **fields: Value) -> LinearAttention:
    """A mixer in fp64 with weights that are not small."""
    torch.manual_seed(0)
    config = make_config("linear_attention", width, fields)
    module = load_mixer("linear_attention")(config).double()
    assert isinstance(module, LinearAttention)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return module


def projected(module: LinearAttention, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head, (B, H, T, size): the order of the authors' code."""
    q, k = module.qk(x_BTD).unflatten(-1, (2, module.config.heads, -1)).unbind(2)
    v = module.value(x_BTD).unflatten(-1, (module.config.heads, -1))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def inputs(tokens: int = 40) -> Tensor:
    return torch.randn(
        2, tokens, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def test_defaults_draw_their_start_as_the_published_studies_did() -> None:
    """Three projections and no more, in this order, from the same random numbers."""
    config = make_config("linear_attention", 24, {"heads": 2})
    torch.manual_seed(5)
    module = load_mixer("linear_attention")(config)
    torch.manual_seed(5)
    linears = [torch.nn.Linear(24, size, bias=False) for size in (2 * 2 * 16, 24, 24)]
    drawn = [torch.empty_like(linear.weight).normal_(std=0.02) for linear in linears]
    named = dict(module.named_parameters())
    assert list(named) == ["qk.weight", "value.weight", "out.weight"]
    assert not list(module.buffers())
    for found, expected in zip(named.values(), drawn, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("normalise", [True, False])
@torch.no_grad()
def test_taylor_is_based_of_fla(normalise: bool) -> None:
    """With the scale it takes if none is given, 1 / sqrt(f). Both add 1e-6 to denominators."""
    module = build(heads=2, normalise=normalise)
    q, k, v = projected(module, inputs())
    y = fla_reference("based").naive_parallel_based(q, k, v, use_norm=normalise)
    expected = module.out(y.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(module(inputs()), expected, atol=EXACT, rtol=EXACT)


@torch.no_grad()
def test_taylor_is_the_chunked_based_of_fla() -> None:
    module = build(heads=2)
    q, k, v = projected(module, inputs())
    expected = fla_reference("based").naive_chunk_based(q, k, v, chunk_size=8)
    y_BTD = module.out(expected.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(module(inputs()), y_BTD, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@torch.no_grad()
def test_plain_maps_are_linear_attention_of_fla(feature_map: str, normalise: bool) -> None:
    """It maps nothing, so we map for it; without a normaliser its scale of 1 / sqrt(f) would stay.

    It works in fp32 whatever it is given, and adds 1e-10 to denominators where we add 1e-6: here
    they are not below 0.01.
    """
    module = build(heads=2, feature_map=feature_map, normalise=normalise)
    q, k, v = projected(module, inputs())
    phi = torch.relu if feature_map == "relu" else lambda x: 1 + F.elu(x)
    q, k = phi(q), phi(k)
    denominator = (q * k.cumsum(2)).sum(-1)
    assert denominator.min() > 0.01
    y, _ = fla_reference("linear_attn").naive_recurrent_linear_attn(
        *(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=normalise
    )
    expected = module.out(y.flatten(-2))
    # 1e-6 of at least 0.01 is a part in 10^4 at most.
    torch.testing.assert_close(module(inputs()), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_decay_and_head_mix_are_those_of_the_published_matrix() -> None:
    """Weights times gamma^(i - j) times a number of the query's token; the normaliser has neither.

    So `fixed_decay` with `decay_const` -3 and its projection work in the authors' code.
    """
    module = build(heads=4, feature_dim=4, fixed_decay=True, head_mix=True)
    x_BTD = inputs(12)
    q, k, v = projected(module, x_BTD)
    weight = 1 + (score := q @ k.mT / 2) + score.square() / 2
    age = torch.arange(12.0, dtype=torch.float64)[:, None] - torch.arange(12.0)
    gamma = 1 - 2.0 ** (-3 - torch.arange(4.0, dtype=torch.float64))
    assert gamma.tolist() == [0.875, 0.9375, 0.96875, 0.984375]
    decay = (gamma[:, None, None] ** age).tril()
    mixed = decay * module.head_scale(x_BTD).transpose(1, 2)[..., None]
    y = (weight * mixed) @ v / (weight.tril().sum(-1, keepdim=True) + 1e-6)
    expected = module.out(y.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(module(x_BTD), expected, atol=EXACT, rtol=EXACT)


@torch.no_grad()
def test_compact_and_full_taylor_are_one_function() -> None:
    compact, full = build(), build(compact=False)
    torch.testing.assert_close(compact(inputs()), full(inputs()), atol=EXACT, rtol=EXACT)
    assert state_bytes(compact.config, 64, torch.float32) == 4 * 153 * 25
    assert state_bytes(full.config, 64, torch.float32) == 4 * 273 * 25


@torch.no_grad()
def test_cosformer_weighs_by_the_cosine_of_the_distance() -> None:
    """As published, but over `max_len` tokens and not over as many as there happen to be."""
    module = build(feature_map="cosformer", max_len=64)
    q, k, v = projected(module, inputs())
    position = torch.arange(40, dtype=torch.float64)
    distance = position[:, None] - position
    weight = (q.relu() @ k.relu().mT * (torch.pi / 2 * distance / 64).cos()).tril()
    y = weight @ v / (weight.sum(-1, keepdim=True) + 1e-6)
    expected = module.out(y.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(module(inputs()), expected, atol=EXACT, rtol=EXACT)
    # What is published in Zoology: a text read on its own, and as the start of a longer one.
    torch.testing.assert_close(module(inputs()[:, :20]), expected[:, :20], atol=EXACT, rtol=EXACT)


def test_members_of_a_population_have_random_features_of_their_own() -> None:
    fields: dict[str, Value] = {"feature_map": "performer", "random_features": 20}
    one, other = (
        load_mixer("linear_attention")(make_config("linear_attention", 24, fields))
        for _ in range(2)
    )
    torch.manual_seed(3)
    again = [build(**fields).projection for _ in range(2)]
    assert not torch.equal(one.get_buffer("projection"), other.get_buffer("projection"))
    assert torch.equal(*again)
    assert "projection" in one.state_dict()


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"feature_dim": 16}, 153 * 65),
        ({"feature_dim": 16, "compact": False}, 153 * 65),  # counted as compact all the same
        ({"feature_dim": 24, "heads": 2}, 2 * 325 * 33),
        ({"feature_map": "elu", "feature_dim": 64}, 64 * 65),
        ({"feature_map": "cosformer", "feature_dim": 64}, 128 * 65),
        ({"feature_map": "performer", "feature_dim": 64}, 64 * 65),
        ({"normalise": False}, None),
    ],
)
def test_state_as_zoology_counts_it(fields: dict[str, Value], numbers: int | None) -> None:
    assert make_config("linear_attention", 64, fields).zoology_state_elements(1024) == numbers


PUBLISHED = {
    48: {8: 9_396, 16: 30_564, 24: 64_276},
    64: {8: 12_468, 16: 40_548, 24: 85_268},
    128: {8: 24_756, 16: 80_484, 24: 169_236},
}
"""Bytes in the published figure by width and feature dimension; with 3 tokens of a convolution."""


def test_published_state_sizes_come_out() -> None:
    for width, sizes in PUBLISHED.items():
        for feature_dim, published in sizes.items():
            config = make_config("linear_attention", width, {"feature_dim": feature_dim})
            counted = config.zoology_state_elements(1024)
            assert counted is not None and 4 * (counted + 3 * width) == published


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"random_features": 0}, "random_features is 0; it must be at least 1"),
        ({"max_len": 0}, "max_len is 0; it must be at least 1"),
    ],
)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("linear_attention", 32, fields)
