"""RWKV-4's time mixing: the contract, and the attention of transformers with the same weights."""

from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from archsearch_plugins.rwkv4 import SUMS
from transformers.models.rwkv.configuration_rwkv import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

from archsearch.mixer import Mixer
from archsearch.registry import load_mixer, make_config
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}
WIDTH = 24
NAMES = {
    "time_decay": "log_rate",
    "time_first": "bonus",
    "time_mix_key": "mix_key",
    "time_mix_value": "mix_value",
    "time_mix_receptance": "mix_receptance",
    "key.weight": "key.weight",
    "value.weight": "value.weight",
    "receptance.weight": "receptance.weight",
    "output.weight": "out.weight",
}
"""Parameters of the peer -> ours."""

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
"""fp32: sums of 24 products, then of 19 tokens, of size 1 and off by 6e-8 each."""


class TestRwkv4(MixerContract):
    mixer = "rwkv4"


class TestRwkv4Reference(MixerContract):
    mixer = "rwkv4"
    width = 20
    backends: ClassVar = REFERENCES


def peer_with_random_weights() -> RwkvSelfAttention:
    generator = torch.Generator().manual_seed(0)
    peer = RwkvSelfAttention(RwkvConfig(hidden_size=WIDTH, num_hidden_layers=2), 0)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if "time_mix" in name:
                parameter.uniform_(generator=generator)
            else:
                scale = WIDTH**-0.5 if parameter.dim() == 2 else 1.0
                parameter.normal_(std=scale, generator=generator)
    return peer


def with_the_weights_of(peer: RwkvSelfAttention) -> Mixer:
    ours = load_mixer("rwkv4")(make_config("rwkv4", WIDTH, {}))
    weights = {NAMES[name]: p.detach().squeeze() for name, p in peer.named_parameters()}
    ours.load_state_dict(weights)
    return ours


@pytest.mark.parametrize("backend", ["reference", "associative"])
@pytest.mark.parametrize("tokens", [1, 19])
def test_mixer_is_that_of_transformers(backend: str, tokens: int) -> None:
    """Its slow path, with every gradient; in fp32, where it keeps its state."""
    peer = peer_with_random_weights()
    ours = with_the_weights_of(peer)
    ours.backends = {"wkv4": backend}
    x_BTD = torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    y, theirs = ours(x_BTD), peer(x_BTD)[0]
    torch.testing.assert_close(y, theirs, **CLOSE)
    y.square().sum().backward()
    theirs.square().sum().backward()
    for name, parameter in peer.named_parameters():
        mine, expected = ours.get_parameter(NAMES[name]).grad, parameter.grad
        assert mine is not None
        if expected is None:  # what has decayed does not matter to a lone token
            assert name == "time_decay" and tokens == 1 and not mine.any()
        else:
            # Sums over 38 tokens of what is off by some 1e-6.
            torch.testing.assert_close(mine, expected.squeeze(), atol=1e-4, rtol=1e-4)


def test_a_state_of_transformers_goes_on_alike() -> None:
    """Its states are ours but for the exponent of an empty one, which is -1e38 there and 0 here.

    One sequence: where it is given one token of several, it mixes each with the last tokens of all.
    """
    peer = peer_with_random_weights()
    ours = with_the_weights_of(peer)
    x_BTD = torch.randn(1, 11, WIDTH, generator=torch.Generator().manual_seed(1))
    theirs = [torch.zeros(1, WIDTH, 2) for _ in range(5)]
    theirs[4] -= 1e38
    state = ours.init_state(1, 11, torch.float32, "cpu")
    with torch.no_grad():
        for segment in x_BTD.split((4, 1, 6), dim=1):
            y, state = ours.mix(segment, state)
            expected, theirs = peer(segment, state=theirs, use_cache=True)
            torch.testing.assert_close(y, expected, **CLOSE)
            for name, kept in zip(("last", *SUMS), theirs[1:], strict=True):
                torch.testing.assert_close(state[name], kept[:, :, 0], **CLOSE)


def test_state_is_four_numbers_a_channel() -> None:
    config = make_config("rwkv4", 64, {})
    sizes = {part.name: part.state_bytes for part in config.state_spec(1024, torch.bfloat16)}
    assert sizes == {"last": 128, "numerator": 256, "denominator": 256, "exponent": 256}
