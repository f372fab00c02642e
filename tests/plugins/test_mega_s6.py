"""Mega-S6: the contract, and its attention written out a second time, token by token."""

import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from archsearch_kernels import families
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestMegaS6ChunkLongerThanTheSequence(MixerContract):
    mixer = "mega_s6"


class TestMegaS6(MixerContract):
    mixer = "mega_s6"
    fields: ClassVar = {"chunk": 5, "z_dim": 6, "conv": 2}
    width = 20


class TestMegaS6Reference(MixerContract):
    mixer = "mega_s6"
    fields: ClassVar = {"chunk": 16, "state_dim": 8}
    backends: ClassVar = REFERENCES


def build(chunk: int) -> Mixer:
    torch.manual_seed(0)
    module = load_mixer("mega_s6")(make_config("mega_s6", 6, {"chunk": chunk, "z_dim": 4}))
    module = module.double()
    for parameter in module.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return module


def rotated(x_Z: Tensor, position: int) -> Tensor:
    """Pairs (i, i + Z / 2) turned by position / 10000^(2 i / Z)."""
    half = x_Z.shape[0] // 2
    y = x_Z.clone()
    for i in range(half):
        angle = position * 10_000 ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        y[i] = x_Z[i] * cos - x_Z[half + i] * sin
        y[half + i] = x_Z[half + i] * cos + x_Z[i] * sin
    return y


def textbook_mega(p: dict[str, Tensor], x: Tensor, s6: Tensor, chunk: int) -> Tensor:
    """One sequence, (T, D), from the outputs of its state space."""
    D, Z = x.shape[1], p["gamma"].shape[1]
    rows, keys, values = [], [], []
    for t, row in enumerate(x):
        u, z, r, g = (p["base.weight"] @ F.silu(s6[t]) + p["base.bias"]).split((D, Z, D, D))
        query, key = (F.silu(z) * p["gamma"][n] + p["beta"][n] for n in range(2))
        keys.append(key)
        values.append(F.silu(p["value.weight"] @ row + p["value.bias"]))
        seen = range(t - t % chunk, t + 1)
        scores = [
            query @ keys[j] / math.sqrt(Z)
            + rotated(p["bias"][0], t % chunk) @ rotated(p["bias"][1], j % chunk)
            for j in seen
        ]
        weights = torch.stack(scores).exp()
        o = sum(w * values[j] for w, j in zip(weights, seen, strict=True)) / weights.sum()
        h = F.silu(g + p["out.weight"] @ (F.silu(r) * o) + p["out.bias"])
        rows.append(u.sigmoid() * (h - row))
    return torch.stack(rows)


@pytest.mark.parametrize("chunk", [1, 4, 5, 32])
def test_mixer_is_the_textbook_formula(chunk: int) -> None:
    module = build(chunk)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x_BTD = torch.randn(2, 14, 6, dtype=torch.float64)
    s6_BTD, _, _ = module.s6(x_BTD, None, None, module.backends, False)  # held to peers for `mamba`
    expected = torch.stack(
        [textbook_mega(parameters, x, s6, chunk) for x, s6 in zip(x_BTD, s6_BTD, strict=True)]
    )
    torch.testing.assert_close(module(x_BTD), expected, atol=1e-10, rtol=1e-10)
    state, parts = module.init_state(2, 14, torch.float64, "cpu"), []
    for segment in x_BTD.split((6, 7, 1), 1):  # cuts are no ends of chunks
        part, state = module.mix(segment, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-10, rtol=1e-10)


def test_only_the_states_reach_across_chunks() -> None:
    """A value of an earlier chunk is never attended to; what S6 kept of its token is."""
    module = build(4)
    x_BTD = torch.randn(1, 8, 6, dtype=torch.float64)
    changed = x_BTD.clone()
    changed[:, 0] += 1
    assert not torch.allclose(module(x_BTD)[:, 4:], module(changed)[:, 4:])
    with torch.no_grad():  # no state: read nothing, and see no neighbour in the convolution
        module.s6.x_proj.weight.zero_()
        module.s6.conv_weight[:, :-1] = 0
    assert torch.equal(module(x_BTD)[:, 4:], module(changed)[:, 4:])
    assert not torch.allclose(module(x_BTD)[:, 3], module(changed)[:, 3])


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"chunk": 0}, "chunk is 0; it must be at least 1"),
    ({"state_dim": 0}, "state_dim is 0; it must be at least 1"),
    ({"z_dim": 5}, "z_dim is 5; it must be even, at least 2"),
    ({"conv": 1}, "conv is 1; it must be at least 2"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("mega_s6", 32, fields)
