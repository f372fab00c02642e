"""The MLPs keep the contract of a mixer, keep nothing else, and look at one token at a time."""

from typing import ClassVar

import pytest
import torch

from archsearch.mixer import state_bytes
from archsearch.registry import channel_mixer_names, load_mixer, make_config
from archsearch.testing import MixerContract


class TestSwiGlu(MixerContract):
    mixer = "swiglu"


class TestSwiGluNarrow(MixerContract):
    mixer = "swiglu"
    fields: ClassVar = {"ratio": 0.7}


class TestMlp(MixerContract):
    mixer = "mlp"


def test_installed_channel_mixers() -> None:
    assert channel_mixer_names() == ("mlp", "swiglu")


@pytest.mark.parametrize("name", channel_mixer_names())
def test_a_channel_mixer_sees_one_token_and_keeps_nothing(name: str) -> None:
    torch.manual_seed(0)
    config = make_config(name, 16, {"ratio": 2.0})
    module, x_BTD = load_mixer(name)(config), torch.randn(2, 5, 16)
    assert state_bytes(config, 64, torch.float32) == 0
    changed = x_BTD.clone()
    changed[:, 2] += 1
    differs_T = (module(x_BTD) != module(changed)).any(-1).any(0)
    assert differs_T.tolist() == [False, False, True, False, False]


def test_mlps_are_what_their_equations_say() -> None:
    torch.manual_seed(0)
    x_TD = torch.randn(7, 8)
    gated = load_mixer("swiglu")(make_config("swiglu", 8, {"ratio": 3.0}))
    gate_up, down = gated.get_parameter("gate_up.weight"), gated.get_parameter("down.weight")
    gate, up = x_TD @ gate_up[:24].T, x_TD @ gate_up[24:].T
    torch.testing.assert_close(gated(x_TD), (gate * gate.sigmoid() * up) @ down.T)
    plain = load_mixer("mlp")(make_config("mlp", 8, {"ratio": 3.0}))
    inner = x_TD @ plain.get_parameter("up.weight").T
    half = inner * (1 + torch.erf(inner / 2**0.5)) / 2
    torch.testing.assert_close(plain(x_TD), half @ plain.get_parameter("down.weight").T)
