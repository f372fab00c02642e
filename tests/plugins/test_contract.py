"""Every installed mixer keeps the contract, in its defaults and wherever its settings branch."""

import re
from pathlib import Path
from typing import ClassVar

import archsearch_kernels
from archsearch_kernels import families

from archsearch.registry import load_mixer, mixer_names
from archsearch.testing import MixerContract
from archsearch.testing.contract import LONG

REFERENCES = {one.name: "reference" for one in families()}


class TestAttention(MixerContract):
    mixer = "attention"


class TestAttentionGrouped(MixerContract):
    mixer = "attention"
    fields: ClassVar = {"heads": 4, "kv_heads": 2}


class TestAttentionSharedKeysRotary(MixerContract):
    mixer = "attention"
    fields: ClassVar = {"heads": 4, "kv_heads": 1, "rope": True}
    width = 24


class TestAttentionReference(MixerContract):
    mixer = "attention"
    fields: ClassVar = {"heads": 2, "rope": True}
    backends: ClassVar = REFERENCES


class TestSlidingWindowLongerThanTheSequence(MixerContract):
    mixer = "sliding_window"


class TestSlidingWindowRotary(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {"window": 5, "heads": 2, "rope": True}


class TestSlidingWindowOfOne(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {"window": 1}


class TestSlidingWindowAsLongAsASequence(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {"window": 33, "heads": 4}
    backends: ClassVar = {"sliding_window": "masked"}


class TestSlidingWindowReference(MixerContract):
    mixer = "sliding_window"
    fields: ClassVar = {"window": 7}
    backends: ClassVar = REFERENCES


class TestLinearAttention(MixerContract):
    mixer = "linear_attention"


class TestLinearAttentionHeads(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"feature_dim": 4, "heads": 4}
    width = 20


class TestLinearAttentionReference(MixerContract):
    mixer = "linear_attention"
    fields: ClassVar = {"feature_dim": 8}
    backends: ClassVar = REFERENCES


class TestBaseConv(MixerContract):
    mixer = "base_conv"


class TestBaseConvWide(MixerContract):
    mixer = "base_conv"
    fields: ClassVar = {"kernel": 9}


class TestGatedDelta(MixerContract):
    mixer = "gated_delta"


class TestGatedDeltaPlain(MixerContract):
    mixer = "gated_delta"
    fields: ClassVar = {"heads": 1, "head_dim": 12, "expand_v": 1, "conv": 0}
    width = 20


class TestGatedDeltaReference(MixerContract):
    mixer = "gated_delta"
    fields: ClassVar = {"head_dim": 8, "conv": 2}
    backends: ClassVar = REFERENCES


def test_every_installed_mixer_is_tested() -> None:
    """Here or in a file of its own beside this one."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    tested = {
        name
        for file in files
        for name in re.findall(r'^    mixer = "(\w+)"$', file.read_text(), re.M)
    }
    assert tested == set(mixer_names())


def test_the_longest_sequence_crosses_the_chunks_of_every_kernel() -> None:
    sources = Path(archsearch_kernels.__file__).parent.rglob("*.py")
    chunks = [
        int(n) for file in sources for n in re.findall(r"^CHUNK = (\d+)$", file.read_text(), re.M)
    ]
    assert len(chunks) >= 5 and max(chunks) < LONG


def test_every_backend_a_mixer_allows_exists() -> None:
    existing = {one.name: set(one.backends) for one in families()}
    for name in mixer_names():
        for family, allowed in load_mixer(name).kernels.items():
            assert set(allowed) <= existing[family]
