"""State bytes in Zoology's convention are those of its published figures (fp32, 1024 tokens)."""

import pytest
import torch

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.cost import state_bytes, zoology_state_bytes
from archsearch.space import Value

CONTEXT = 1024
Fields = dict[str, Value]


def behind_conv(width: int, mixer: str, fields: Fields) -> ArchSpec:
    """The published layout: a short convolution of 3, then the mixer."""
    layers = (LayerSpec(mixer="base_conv", fields={}), LayerSpec(mixer=mixer, fields=fields))
    return ArchSpec(width=width, layers=layers)


def twice(width: int, mixer: str, fields: Fields) -> ArchSpec:
    return ArchSpec(width=width, layers=(LayerSpec(mixer=mixer, fields=fields),) * 2)


BASED = {
    48: {8: 9_396, 16: 30_564, 24: 64_276},
    64: {8: 12_468, 16: 40_548, 24: 85_268},
    128: {8: 24_756, 16: 80_484, 24: 169_236},
}
WINDOWS = {8: 9_728, 16: 17_920, 32: 34_304, 64: 67_072, 128: 132_608}
WINDOWS |= {256: 263_680, 512: 525_824, 1024: 1_050_112}
MAMBA = {(64, 8): 8_192, (64, 16): 16_384, (128, 16): 32_768, (256, 24): 98_304}
DELTA_NET = {64: 8_960, 128: 34_304, 256: 134_144}
GATED_DELTA = {64: 17_152, 128: 67_072, 256: 265_216}
RWKV7 = {64: 17_152, 128: 34_304, 256: 68_608}
GLA = {64: 4_864, 128: 17_920, 256: 68_608}


def published() -> list[tuple[ArchSpec, int]]:
    two_heads: Fields = {"heads": 2}
    return [
        *(
            (behind_conv(d, "linear_attention", {"feature_dim": f}), size)
            for d, sizes in BASED.items()
            for f, size in sizes.items()
        ),
        (behind_conv(64, "attention", {}), 525_056),
        (behind_conv(128, "attention", {}), 1_050_112),
        *((behind_conv(128, "sliding_window", {"window": w}), size) for w, size in WINDOWS.items()),
        *((twice(d, "mamba", {"state_dim": n}), size) for (d, n), size in MAMBA.items()),
        (twice(64, "hyena", {}), 524_288),
        (twice(64, "h3", {"state_dim": 16}), 8_192),
        *(
            (behind_conv(d, "delta_net", {**two_heads, "head_dim": d // 2, "expand_v": 1}), size)
            for d, size in DELTA_NET.items()
        ),
        *(
            (behind_conv(d, "gated_delta", {**two_heads, "head_dim": d // 2}), size)
            for d, size in GATED_DELTA.items()
        ),
        *((behind_conv(d, "rwkv7", {"head_dim": 64}), size) for d, size in RWKV7.items()),
        *((behind_conv(d, "gla", {**two_heads, "conv": 0}), size) for d, size in GLA.items()),
    ]


def test_every_published_size_comes_out() -> None:
    """All but NSA's, which is no mixer here: its count leaves out the keys it selects from."""
    found = {arch.summary: (zoology_state_bytes(arch, CONTEXT), size) for arch, size in published()}
    assert not {name: sizes for name, sizes in found.items() if sizes[0] != sizes[1]}


@pytest.mark.parametrize(
    ("arch", "exact"),
    [
        # The convention counts 3 of a convolution's tokens where 2 are kept.
        (behind_conv(64, "linear_attention", {"feature_dim": 16}), 40_548 - 4 * 64),
        # It leaves the convolutions of Mamba out: here with the 3 tokens that are kept, not 4.
        (twice(64, "mamba", {"state_dim": 8}), 8_192 + 2 * 4 * 3 * 128),
        # A position counter takes 8 bytes.
        (behind_conv(128, "attention", {}), 1_050_112 - 4 * 128 + 8),
    ],
)
def test_exact_bytes_differ_where_the_convention_is_not_exact(arch: ArchSpec, exact: int) -> None:
    assert state_bytes(arch, CONTEXT, torch.float32) == exact


def test_an_unknown_mixer_has_no_published_size() -> None:
    assert zoology_state_bytes(twice(64, "rwkv_channel", {}), CONTEXT) is None
