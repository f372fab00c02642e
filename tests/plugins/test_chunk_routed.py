"""Chunk routing keeps the contract with every switch, and is its two operators at the extremes."""

from typing import ClassVar

from archsearch_kernels import families

from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}
SMALL = {"chunk": 4, "head_dim": 8}
"""Chunks so short that the contract's 33 tokens hold eight."""


class TestChunkRouted(MixerContract):
    mixer = "chunk_routed"


class TestShortChunks(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL


class TestReference(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"split": 2}
    backends: ClassVar = REFERENCES


class TestSharedRoutesRotaryPlain(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {
        "heads": 4,
        "groups": 2,
        "split": 2,
        "rope": True,
        "expand_v": 1,
        "conv": 0,
    }
    width = 20


class TestMamba2(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"linear": "mamba2"}


class TestMamba2Reference(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"linear": "mamba2", "conv": 2}
    backends: ClassVar = REFERENCES


class TestSoftmaxInside(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"inside": "softmax"}


class TestLinearInside(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"inside": "linear"}


class TestNoDecayThroughKeptChunks(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"decay_through": False}


class TestJointNorm(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"norm": "joint"}


class TestWithoutWeights(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"weights": "none"}


class TestSigmoidWeights(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"weights": "sigmoid"}


class TestLinearWeightsFromInput(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"weights": "linear", "weights_from": "input"}


class TestGradientOfBothWays(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"route_gradient": "both"}


class TestCapOfTwoChunks(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"max_kv_chunks": 2, "heads": 4}


class TestCapOfAShareReference(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"kv_share_max": 0.5}
    backends: ClassVar = REFERENCES


class TestPenalty(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"penalty": 1.0, "kv_share_target": 0.25, "kv_share_max": 0.5}
