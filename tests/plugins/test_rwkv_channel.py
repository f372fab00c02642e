"""RWKV-4's channel mixing keeps the contract and is what transformers computes."""

from typing import ClassVar

import torch
from transformers import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward

from archsearch.registry import load_mixer, make_config
from archsearch.testing import MixerContract


class TestRwkvChannel(MixerContract):
    mixer = "rwkv_channel"


class TestRwkvChannelNarrow(MixerContract):
    mixer = "rwkv_channel"
    fields: ClassVar = {"ratio": 2.0}
    width = 20


def test_equals_the_peer_with_shared_weights() -> None:
    torch.manual_seed(0)
    width, inner = 12, 24
    peer = RwkvFeedForward(RwkvConfig(hidden_size=width, intermediate_size=inner)).double()
    ours = load_mixer("rwkv_channel")(make_config("rwkv_channel", width, {"ratio": 2.0})).double()
    with torch.no_grad():
        for mine, its in (
            ("key.weight", "key.weight"),
            ("receptance.weight", "receptance.weight"),
            ("value.weight", "value.weight"),
            ("mix_key", "time_mix_key"),
            ("mix_receptance", "time_mix_receptance"),
        ):
            parameter, other = ours.get_parameter(mine), peer.get_parameter(its)
            other.copy_(torch.rand_like(other))
            parameter.copy_(other.flatten() if parameter.dim() == 1 else other)
    x_BTD = torch.randn(2, 7, width, dtype=torch.float64)
    torch.testing.assert_close(ours(x_BTD), peer(x_BTD)[0], rtol=1e-12, atol=1e-12)
