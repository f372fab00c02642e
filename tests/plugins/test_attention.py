"""Attention's switches: the contract, the attention of Qwen3 with the same weights, state sizes."""

from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from peers import qwen3_attention, qwen3_output
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestAttentionNormed(MixerContract):
    mixer = "attention"
    fields: ClassVar = {"heads": 2, "qk_norm": True}


class TestAttentionNormedRotaryGrouped(MixerContract):
    mixer = "attention"
    fields: ClassVar = {
        "heads": 8,
        "kv_heads": 4,
        "rope": True,
        "rope_base": 50.0,
        "qk_norm": True,
    }
    width = 48


class TestAttentionNormedReference(MixerContract):
    mixer = "attention"
    fields: ClassVar = {"heads": 2, "kv_heads": 1, "rope": True, "qk_norm": True}
    backends: ClassVar = REFERENCES


WIDTH, HEADS, GROUPS, BASE = 32, 4, 2, 300.0


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_normed_rotary_grouped_attention_is_that_of_qwen3(backend: str) -> None:
    peer = qwen3_attention(WIDTH, HEADS, GROUPS, BASE)
    fields: dict[str, Value] = {
        "heads": HEADS,
        "kv_heads": GROUPS,
        "rope": True,
        "rope_base": BASE,
        "qk_norm": True,
    }
    ours = load_mixer("attention")(make_config("attention", WIDTH, fields))
    ours.load_state_dict(peer.weights)
    ours.backends = {"attention": backend}
    x_BTD = torch.randn(2, 19, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = qwen3_output(peer, x_BTD, window=19)
    # fp32 sums of 32 terms; their squares are meaned with 1e-12 added, ours summed with 1e-6.
    torch.testing.assert_close(ours(x_BTD), expected, atol=1e-5, rtol=1e-5)


def test_scores_do_not_grow_with_normed_queries_and_keys() -> None:
    ours = load_mixer("attention")(make_config("attention", 16, {"qk_norm": True}))
    x_BTD = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(0))
    before = ours(x_BTD)
    with torch.no_grad():
        ours.qkv.weight[:32] *= 100  # type: ignore[index]
    # Queries of length 0.1 carry 1e-6 more under the root: 1e-4 of them.
    torch.testing.assert_close(ours(x_BTD), before, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("width", "elements"), [(64, 131_072), (128, 262_144)])
def test_counted_state_is_the_cache_of_a_whole_context(width: int, elements: int) -> None:
    assert make_config("attention", width, {}).zoology_state_elements(1024) == elements


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"rope_base": 0.5}, "rope_base is 0.5; it must be at least 1"),
    ({"heads": 8, "kv_heads": 3}, "kv_heads is 3; it must divide heads, which is 8"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("attention", 32, fields)


def test_a_larger_base_turns_more_slowly() -> None:
    """The score of two tokens one apart, of the second pair of numbers: cos(base^-1/2)."""
    from archsearch_kernels.rotary import rotate

    x = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64).expand(1, 2, 1, 4)

    def score(base: float) -> Tensor:
        turned = rotate(x, torch.arange(2), base)
        return (turned[0, 0] * turned[0, 1]).sum()

    for base in (4.0, 10_000.0):
        torch.testing.assert_close(score(base), torch.tensor(base**-0.5).double().cos())
