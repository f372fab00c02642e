"""H3: the contract, its recurrence written out a second time, and its published state size."""

from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestH3(MixerContract):
    mixer = "h3"


class TestH3Plain(MixerContract):
    mixer = "h3"
    fields: ClassVar = {"head_dim": 1, "state_dim": 8}
    width = 20
    backends: ClassVar = REFERENCES


def build(width: int, **fields: int) -> Mixer:
    torch.manual_seed(0)
    module = load_mixer("h3")(make_config("h3", width, fields)).double()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return module


def textbook_h3(p: dict[str, Tensor], x: Tensor, size: int) -> Tensor:
    """One sequence, (T, D), by the recurrence of a zero-order hold with its input weight."""
    D, taps = x.shape[1], p["shift"].shape[0]
    A = -p["log_rate"].exp() + 1j * p["frequency"]
    decay = (p["log_dt"].exp() * A).exp()
    written, read = (decay - 1) / A, torch.view_as_complex(p["C"])
    h = torch.zeros(D // size, size, size, A.shape[1], dtype=torch.complex128)
    keys, rows = [torch.zeros(D, dtype=torch.float64)] * taps, []
    for row in x:
        q, k, v = (p["qkv.weight"] @ row + p["qkv.bias"]).split(D)
        keys = [k, *keys[:-1]]
        shifted = sum(p["shift"][j] * keys[j] for j in range(taps))
        out = torch.zeros(D, dtype=torch.float64)
        for head in range(D // size):
            for i in range(size):
                for j in range(size):
                    u = shifted[head * size + i] * v[head * size + j]
                    h[head, i, j] = decay[head] * h[head, i, j] + written[head] * u
                    y = 2 * (read[head] @ h[head, i, j]).real + p["D"][head] * u
                    out[head * size + j] += q[head * size + i] * y
        rows.append(p["out.weight"] @ out + p["out.bias"])
    return torch.stack(rows)


@pytest.mark.parametrize("size", [1, 2])
def test_mixer_is_the_textbook_recurrence(size: int) -> None:
    module = build(4, state_dim=6, head_dim=size)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x_BTD = torch.randn(2, 13, 4, dtype=torch.float64)
    expected = torch.stack([textbook_h3(parameters, x, size) for x in x_BTD])
    torch.testing.assert_close(module(x_BTD), expected, atol=1e-10, rtol=1e-10)


def test_published_state_of_two_layers() -> None:
    """Width 64, N = 64 / 4: 8 192 bytes, 4 to a number."""
    config = make_config("h3", 64, {"state_dim": 16, "head_dim": 2})
    assert 2 * 4 * (config.zoology_state_elements(1024) or 0) == 8192


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"state_dim": 7}, "state_dim is 7; it must be even, at least 2"),
    ({"state_dim": 0}, "state_dim is 0; it must be even, at least 2"),
    ({"head_dim": 3}, "head_dim is 3; it must divide the width 32"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("h3", 32, fields)
