"""Every installed mixer keeps the contract, in its defaults and in the settings that differ."""

from archsearch.testing import MixerContract


class TestAttention(MixerContract):
    mixer = "attention"
class TestSlidingWindow(MixerContract):
    mixer = "sliding_window"
class TestLinear(MixerContract):
    mixer = "linear_attention"
class TestConv(MixerContract):
    mixer = "base_conv"
class TestGDN(MixerContract):
    mixer = "gated_delta"
