"""BaseConv's second form: the contract, and both forms written out with torch's convolution."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract


class TestBasedForm(MixerContract):
    mixer = "base_conv"
    fields: ClassVar = {"form": "based"}


class TestBasedFormWide(MixerContract):
    mixer = "base_conv"
    fields: ClassVar = {"form": "based", "expand": 4, "kernel": 8}
    width = 12


def build(**fields: Value) -> Mixer:
    torch.manual_seed(0)
    return load_mixer("base_conv")(make_config("base_conv", 16, fields)).double()


@pytest.mark.parametrize(("kernel", "expand"), [(3, 2), (8, 1), (2, 4)])
def test_based_form_is_a_gated_convolution_between_projections(kernel: int, expand: int) -> None:
    ours = build(form="based", kernel=kernel, expand=expand)
    inner = 16 * expand
    conv = nn.Conv1d(inner, inner, kernel, padding=kernel - 1, groups=inner, dtype=torch.float64)
    weights = dict(ours.named_parameters())
    conv.load_state_dict({"weight": weights["conv_weight"][:, None], "bias": weights["conv_bias"]})
    x_BTD = torch.randn(2, 11, 16, dtype=torch.float64)
    projected = F.linear(x_BTD, weights["inner.weight"], weights["inner.bias"])
    u, z = projected[..., :inner], projected[..., inner:]
    convolved = conv(u.transpose(1, 2))[..., :11].transpose(1, 2)
    expected = F.linear(F.silu(convolved) * z, weights["out.weight"], weights["out.bias"])
    torch.testing.assert_close(ours(x_BTD), expected, atol=1e-12, rtol=1e-12)  # a few roundings


def test_zoology_form_is_a_gated_convolution_with_a_residual() -> None:
    ours = build(kernel=4)
    conv = nn.Conv1d(16, 16, 4, padding=3, groups=16, dtype=torch.float64)
    weights = dict(ours.named_parameters())
    conv.load_state_dict({"weight": weights["conv_weight"][:, None], "bias": weights["conv_bias"]})
    x_BTD = torch.randn(2, 11, 16, dtype=torch.float64)
    convolved = conv(x_BTD.transpose(1, 2))[..., :11].transpose(1, 2)
    gate = F.linear(x_BTD, weights["gate.weight"], weights["gate.bias"])
    torch.testing.assert_close(ours(x_BTD), convolved * gate + x_BTD, atol=1e-12, rtol=1e-12)


def test_counted_state_holds_one_token_more_than_is_kept() -> None:
    config = make_config("base_conv", 64, {"kernel": 3})
    assert config.zoology_state_elements(1024) == 3 * 64
    based = make_config("base_conv", 64, {"kernel": 3, "form": "based"})
    assert based.zoology_state_elements(1024) == 3 * 128


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"form": "gated"}, "form is 'gated'; it must be one of: zoology, based"),
    ({"form": "based", "expand": 0}, "expand is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("base_conv", 32, fields)
