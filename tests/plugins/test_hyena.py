"""Hyena: the contract, its filter written out a second time, and its published state size."""

import math
from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from archsearch_plugins.hyena import Hyena
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer
from archsearch.registry import load_mixer, make_config
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestHyena(MixerContract):
    mixer = "hyena"


class TestHyenaReference(MixerContract):
    mixer = "hyena"
    fields: ClassVar = {"max_len": 16, "filter_dim": 12, "bands": 2, "conv": 2}
    width = 20
    backends: ClassVar = REFERENCES


def build(**fields: int) -> Mixer:
    torch.manual_seed(0)
    module = load_mixer("hyena")(make_config("hyena", 6, fields)).double()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return module


def textbook_tap(p: dict[str, Tensor], lag: int, channel: int, max_len: int, bands: int) -> Tensor:
    """One number of the filter, from the published code's formulas."""
    s = lag / max_len
    spacing = (bands - 1 - 1e-4) / (bands - 1)
    angles = [2 * math.pi * s * (1e-4 + b * spacing) for b in range(bands)]
    z = torch.tensor([s, *map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
    for n in range(3):
        weight, bias = p[f"filter_hidden.{n}.weight"], p[f"filter_hidden.{n}.bias"]
        z = torch.sin(p["frequency"] * (weight @ z + bias))
    slow, fast = math.log(100) / 1.5, math.log(100) / 0.3
    rate = slow + (fast - slow) * channel / 5
    return p["filter_out.weight"][channel] @ z * math.exp(-rate * s)


def textbook_hyena(p: dict[str, Tensor], x: Tensor, max_len: int, bands: int) -> Tensor:
    """One sequence, (T, 6), number by number."""
    streams = [p["inner.weight"] @ row + p["inner.bias"] for row in x]
    past = [torch.zeros(18, dtype=torch.float64)] * 2 + streams
    mixed = [
        sum(p["conv_weight"][:, j] * past[t + j] for j in range(3)) + p["conv_bias"]
        for t in range(len(streams))
    ]
    u = [row[6:12] * row[12:] for row in mixed]
    rows = []
    for t, row in enumerate(mixed):
        sums = [
            sum(textbook_tap(p, t - j, c, max_len, bands) * u[j][c] for j in range(t + 1))
            for c in range(6)
        ]
        y = row[:6] * (torch.stack(sums) + p["bias"] * u[t])
        rows.append(p["out.weight"] @ y + p["out.bias"])
    return torch.stack(rows)


def test_mixer_is_the_textbook_formula() -> None:
    module = build(max_len=8, filter_dim=5, bands=3)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x_BTD = torch.randn(2, 11, 6, dtype=torch.float64)
    expected = torch.stack([textbook_hyena(parameters, x, 8, 3) for x in x_BTD])
    torch.testing.assert_close(module(x_BTD), expected, atol=1e-10, rtol=1e-10)


def test_filter_does_not_depend_on_the_context() -> None:
    """A longer sequence, beyond `max_len` too, leaves the outputs at earlier tokens as they are."""
    module = build(max_len=8)
    x_BTD = torch.randn(1, 30, 6, dtype=torch.float64)
    torch.testing.assert_close(module(x_BTD)[:, :5], module(x_BTD[:, :5]), atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_a_state_for_few_tokens_forgets_the_oldest_however_a_sequence_is_cut() -> None:
    module = build(max_len=8)
    x_BTD = torch.randn(1, 20, 6, dtype=torch.float64)

    def run(*cuts: int) -> Tensor:
        state, parts = module.init_state(1, 7, torch.float64, "cpu"), []
        for segment in x_BTD.split(cuts, 1):
            part, state = module.mix(segment, state)
            parts.append(part)
        return torch.cat(parts, 1)

    once = run(20)
    for cuts in ((9, 1, 10), (1,) * 20):
        torch.testing.assert_close(run(*cuts), once, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(once, module(x_BTD))


@torch.no_grad()
def test_a_step_does_not_compute_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state holds it, and nothing else of a step grows with the layers that make it."""
    module = build(max_len=8)
    assert isinstance(module, Hyena)
    x_BTD = torch.randn(1, 9, 6, dtype=torch.float64)
    expected, state = module(x_BTD), module.init_state(1, 9, torch.float64, "cpu")
    monkeypatch.setattr(module, "_filter", None)
    for t, x_BD in enumerate(x_BTD.unbind(1)):
        y_BD, state = module.step(x_BD, state)
        torch.testing.assert_close(y_BD, expected[:, t], atol=1e-12, rtol=1e-12)


def test_published_state_of_two_layers() -> None:
    """Width 64 at 1024 tokens: 524 288 bytes, 4 to a number."""
    assert 2 * 4 * (make_config("hyena", 64, {}).zoology_state_elements(1024) or 0) == 524_288


@pytest.mark.parametrize("name", ["max_len", "filter_dim", "bands"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(InfeasibleError, match=f"{name} is 0; it must be at least 1"):
        make_config("hyena", 32, {name: 0})


def test_a_convolution_of_one_tap_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="conv is 1; it must be at least 2"):
        make_config("hyena", 32, {"conv": 1})
