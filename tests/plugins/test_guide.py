"""docs/writing_mixers.md says what the code says: kernels, backends, state bytes of mixers."""

import math
import re
from pathlib import Path

import pytest
import torch
from archsearch_kernels import families, resolve

from archsearch.mixer import state_bytes
from archsearch.registry import make_config, mixer_names
from archsearch.space import Value

GUIDE = (Path(__file__).parents[2] / "docs" / "writing_mixers.md").read_text()


def test_guide_describes_every_installed_mixer() -> None:
    assert re.findall(r"^### `(\w+)`$", GUIDE, re.MULTILINE) == [
        "attention",
        "sliding_window",
        "linear_attention",
        "base_conv",
        "gated_delta",
    ]
    assert all(f"### `{name}`" in GUIDE for name in mixer_names())


def test_guide_lists_the_kernel_families_with_their_backends() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| `(\w+)` \| `(\w+)` \|$", GUIDE, re.MULTILINE)
    assert {name for name, *_ in rows} == {one.name for one in families()}
    for name, described, on_cpu, on_cuda in rows:
        (one,) = (one for one in families() if one.name == name)
        assert set(re.findall(r"`(\w+)`:", described)) == set(one.backends) - {"reference"}
        assert resolve(name, "cpu", torch.float32) == on_cpu
        assert resolve(name, "cuda", torch.bfloat16) == on_cuda


FORMULAS = {
    "attention": "2 L G K c + 8",
    "sliding_window": "2 min(w, L) D c + 8",
    "linear_attention": "4 H F (D/H + 1)",
    "base_conv": "(k - 1) D c",
    "gated_delta": "4 H V K + (conv - 1) H (2K + V) c",
}


@pytest.mark.parametrize("context", [5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_are_those_of_the_guide(context: int, dtype: torch.dtype) -> None:
    c, D = dtype.itemsize, 32
    cases: list[tuple[str, dict[str, Value], int]] = [
        ("attention", {}, 2 * context * D * c + 8),
        ("attention", {"heads": 4, "kv_heads": 1}, 2 * context * 1 * (D // 4) * c + 8),
        ("sliding_window", {"window": 16, "heads": 2}, 2 * min(16, context) * D * c + 8),
        ("linear_attention", {"feature_dim": 16, "heads": 2}, 4 * 2 * 153 * (D // 2 + 1)),
        ("base_conv", {"kernel": 3}, 2 * D * c),
        (
            "gated_delta",
            {"heads": 2, "head_dim": 8, "expand_v": 2, "conv": 4},
            4 * 2 * 16 * 8 + 3 * 2 * (2 * 8 + 16) * c,
        ),
        ("gated_delta", {"heads": 2, "head_dim": 8, "expand_v": 1, "conv": 0}, 4 * 2 * 8 * 8),
    ]
    for name, fields, expected in cases:
        config = make_config(name, D, fields)
        assert state_bytes(config, context, dtype) == expected, name
        section = GUIDE.split(f"### `{name}`")[1].split("\n#")[0]
        assert f"**{FORMULAS[name]} bytes**" in " ".join(section.split())


def test_published_state_sizes_come_out_of_the_formulas() -> None:
    """Sizes that the published recall figure states for fp32 at 1024 tokens.

    BASED with a convolution of 3 at widths 48, 64, 128; our convolution keeps 2 of the 3 tokens.
    """
    published = {(48, 8): 9_396, (64, 16): 40_548, (128, 24): 169_236}
    for (width, feature_dim), size in published.items():
        memory = make_config("linear_attention", width, {"feature_dim": feature_dim})
        conv = make_config("base_conv", width, {})
        parts = (state_bytes(config, 1024, torch.float32) for config in (memory, conv))
        assert math.fsum(parts) == size - 4 * width
    assert state_bytes(make_config("attention", 128, {}), 1024, torch.float32) == 2**20 + 8
