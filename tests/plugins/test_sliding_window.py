"""Sliding windows' switches: the contract, Qwen3's attention with a window, state sizes."""

from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from peers import qwen3_attention, qwen3_output

from archsearch.errors import InfeasibleError
from archsearch.mixer import state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestSlidingWindowGrouped(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {"window": 6, "heads": 4, "kv_heads": 2}


class TestSlidingWindowNormed(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {"window": 5, "heads": 2, "qk_norm": True}
    backends: ClassVar = {"sliding_window": "masked"}


class TestSlidingWindowNormedRotaryShared(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {
        "window": 8,
        "heads": 4,
        "kv_heads": 1,
        "rope": True,
        "rope_base": 100.0,
        "qk_norm": True,
    }
    width = 24


class TestSlidingWindowNormedReference(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {"window": 7, "heads": 4, "kv_heads": 2, "rope": True, "qk_norm": True}
    backends: ClassVar = REFERENCES


WIDTH, HEADS, GROUPS, BASE = 32, 4, 2, 300.0


@pytest.mark.parametrize("window", [1, 6, 19])
@pytest.mark.parametrize("backend", ["reference", "masked", "blocked"])
def test_normed_rotary_grouped_window_is_that_of_qwen3(backend: str, window: int) -> None:
    peer = qwen3_attention(WIDTH, HEADS, GROUPS, BASE)
    fields: dict[str, Value] = {
        "window": window,
        "heads": HEADS,
        "kv_heads": GROUPS,
        "rope": True,
        "rope_base": BASE,
        "qk_norm": True,
    }
    ours = load_mixer("sliding_window")(make_config("sliding_window", WIDTH, fields))
    ours.load_state_dict(peer.weights)
    ours.backends = {"sliding_window": backend}
    x_BTD = torch.randn(2, 19, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = qwen3_output(peer, x_BTD, window=window)
    # fp32 sums of 32 terms; their squares are meaned with 1e-12 added, ours summed with 1e-6.
    torch.testing.assert_close(ours(x_BTD), expected, atol=1e-5, rtol=1e-5)


def test_grouped_heads_keep_a_smaller_ring() -> None:
    fields: dict[str, Value] = {"window": 64, "heads": 8}
    whole = make_config("sliding_window", 64, fields)
    grouped = make_config("sliding_window", 64, {**fields, "kv_heads": 2})
    counter = 8  # bytes of the position
    sizes = [state_bytes(one, 1024, torch.bfloat16) - counter for one in (whole, grouped)]
    assert sizes == [2 * 64 * 64 * 2, 2 * 64 * 16 * 2]


@pytest.mark.parametrize(("window", "elements"), [(8, 2_048), (1024, 262_144)])
def test_counted_state_is_the_window(window: int, elements: int) -> None:
    config = make_config("sliding_window", 128, {"window": window})
    assert config.zoology_state_elements(1024) == elements


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"heads": 4, "kv_heads": 3}, "kv_heads is 3; it must divide heads, which is 4"),
    ({"rope_base": 0.0}, "rope_base is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("sliding_window", 32, fields)
