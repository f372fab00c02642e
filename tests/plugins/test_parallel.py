"""Mixers side by side keep the contract, whatever they are and however they are merged."""

import re
from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from archsearch_plugins.parallel import Parallel
from torch import Tensor, nn

from archsearch.errors import InfeasibleError, PluginError
from archsearch.mixer import state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Part, Parts, Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}
ATTENTION = Part("attention", {"heads": 2, "rope": True})
DELTA = Part("gated_delta", {"heads": 1, "head_dim": 8, "expand_v": 1})
WINDOW = Part("sliding_window", {"window": 5})
LINEAR = Part("linear_attention", {"feature_dim": 4})


class TestMean(MixerContract):
    mixer = "parallel"
    parts: ClassVar = (ATTENTION, DELTA)


class TestMeanReference(MixerContract):
    mixer = "parallel"
    parts: ClassVar = (ATTENTION, DELTA)
    backends: ClassVar = REFERENCES


class TestWeights(MixerContract):
    mixer = "parallel"
    fields: ClassVar = {"merge": "weights"}
    parts: ClassVar = (LINEAR, WINDOW)


class TestHeads(MixerContract):
    mixer = "parallel"
    fields: ClassVar = {"merge": "heads", "share": 0.25}
    parts: ClassVar = (ATTENTION, DELTA)


class TestHeadsOfThree(MixerContract):
    mixer = "parallel"
    fields: ClassVar = {"merge": "heads", "share": 0.5}
    parts: ClassVar = (DELTA, WINDOW, LINEAR)


class TestPartWhoseEmptyStateIsNotZeros(MixerContract):
    mixer = "parallel"
    parts: ClassVar = (Part("hyena", {"filter_dim": 8, "bands": 2}), WINDOW)


class TestWeightsOfThree(MixerContract):
    """Two of one kind, and one that looks at a token alone."""

    mixer = "parallel"
    fields: ClassVar = {"merge": "weights"}
    parts: ClassVar = (DELTA, DELTA, Part("swiglu", {"ratio": 1.0}))


class TestWithPrefix(MixerContract):
    """The longest prefix of a part is read together, by all parts."""

    mixer = "parallel"
    parts: ClassVar = (Part("prefix_linear", {"prefix_len": 5, "feature_dim": 4}), WINDOW)

    def test_flops_are_close_to_a_count(self) -> None:
        """A prefix costs more than what a step counts; the parts' own numbers are the measure."""
        own = [make_config(part.mixer, self.width, part.fields) for part in self.parts]
        for context in (7, 33):
            merged = 5 * len(own) * self.width  # square, sum, scale, gain, add
            flops = make_config(self.mixer, self.width, {}, self.parts).flops(context)
            assert flops == sum(each.flops(context) for each in own) + merged


def build(parts: Parts, width: int = 16, **fields: Value) -> Parallel:
    torch.manual_seed(0)
    module = load_mixer("parallel")(make_config("parallel", width, fields, parts))
    assert isinstance(module, Parallel)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module.double()


def normed(y_BTU: Tensor) -> Tensor:
    return y_BTU / y_BTU.square().mean(-1, keepdim=True).sqrt()


def weight(module: nn.Module) -> Tensor:
    found = module.get_parameter("weight")
    return found.detach()


INPUT = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLOSE = {"rtol": 1e-3, "atol": 0.0}
"""What NORM_EPSILON does to outputs of a root mean square above 1e-2."""


@torch.no_grad()
def test_mean_gives_every_part_gains_of_its_own() -> None:
    module = build((DELTA, WINDOW))
    first, second = module.parts
    g_ND = weight(module.out)
    expected = (g_ND[0] * normed(first(INPUT)) + g_ND[1] * normed(second(INPUT))) / 2
    torch.testing.assert_close(module(INPUT), expected, **CLOSE)


@torch.no_grad()
def test_weights_add_up_to_one_and_are_observed() -> None:
    module = build((DELTA, LINEAR, WINDOW), merge="weights")
    logits = module.out.get_parameter("logits")
    shares = logits.exp() / logits.exp().sum()
    terms = [share * normed(part(INPUT)) for share, part in zip(shares, module.parts, strict=True)]
    torch.testing.assert_close(module(INPUT), weight(module.out) * sum(terms), **CLOSE)
    assert torch.equal(module.observe(INPUT)["weights"], logits.softmax(0))


@torch.no_grad()
def test_heads_divide_the_width() -> None:
    module = build((DELTA, WINDOW), merge="heads", share=0.25)
    first, second = module.parts
    assert [config.d_model for config in module.config.configs] == [4, 12]
    u_BTD = INPUT @ weight(module.split).T
    slices = (normed(first(u_BTD[..., :4])), normed(second(u_BTD[..., 4:])))
    torch.testing.assert_close(
        module(INPUT), torch.cat(slices, dim=-1) @ weight(module.out).T, **CLOSE
    )


def test_parts_may_tell_something() -> None:
    """What a part observes is known by its number."""
    module = build((Part("chunk_routed", {"chunk": 4, "heads": 1}), WINDOW))
    assert set(module.observe(INPUT)) == {"0.kv_share"}


def test_costs_are_those_of_the_parts() -> None:
    parts = (DELTA, WINDOW)
    config = make_config("parallel", 16, {}, parts)
    own = [make_config(part.mixer, 16, part.fields) for part in parts]
    named = [
        (f"{i}.{one.name}", one.shape, one.dtype)
        for i, each in enumerate(own)
        for one in each.state_spec(64, torch.bfloat16)
    ]
    spec = config.state_spec(64, torch.bfloat16)
    assert [(one.name, one.shape, one.dtype) for one in spec] == named
    assert state_bytes(config, 64, torch.bfloat16) == sum(
        state_bytes(each, 64, torch.bfloat16) for each in own
    )
    unknown = make_config("parallel", 16, {}, (Part("mlp", {}), Part("chunk_routed", {})))
    assert unknown.zoology_state_elements(64) is None
    ranges = unknown.state_range(64, torch.float32)
    assert ranges == unknown.configs[1].state_range(64, torch.float32)  # type: ignore[attr-defined]
    assert ranges.minimum < ranges.maximum


REFUSED: list[tuple[Parts, dict[str, Value], str]] = [
    ((DELTA,), {}, "parts are 1; there must be at least 2"),
    ((DELTA, Part("parallel", {})), {}, "a part is 'parallel'; a part has no parts itself"),
    ((DELTA, WINDOW), {"merge": "sum"}, "merge is 'sum'; it must be mean, weights or heads"),
    ((DELTA, WINDOW), {"merge": "heads", "share": 1.0}, "must leave every part some of the width"),
    ((DELTA, WINDOW, LINEAR), {"merge": "heads", "share": 0.3}, "leaves 11 of the width 16"),
    ((DELTA, Part("attention", {"heads": 3})), {}, "mixer 'attention': heads is 3"),
    (
        (ATTENTION, DELTA),
        {"merge": "heads", "share": 0.125},
        "rope needs an even head size; width 2",
    ),
]


@pytest.mark.parametrize(("parts", "fields", "sentence"), REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(
    parts: Parts, fields: dict[str, Value], sentence: str
) -> None:
    with pytest.raises(InfeasibleError, match=re.escape(sentence)):
        make_config("parallel", 16, fields, parts)


def test_a_mixer_of_one_piece_has_no_parts() -> None:
    with pytest.raises(PluginError, match="'attention' is not made of mixers"):
        make_config("attention", 16, {}, (DELTA, WINDOW))
