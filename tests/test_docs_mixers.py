"""docs/mixers.md is what the mixers say; the state bytes they declare are those of hand counts."""

import runpy
from pathlib import Path

import pytest
import torch

from archsearch.mixer import state_bytes
from archsearch.registry import load_mixer, make_config, mixer_names
from archsearch.space import Value

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_is_what_the_mixers_say() -> None:
    written = runpy.run_path(str(DOCS / "mixers_page.py"))["page"]()
    assert (DOCS / "mixers.md").read_text(encoding="utf-8") == written, "run `make docs`"


@pytest.mark.parametrize("name", mixer_names())
def test_every_mixer_has_a_source_an_equation_and_a_figure(name: str) -> None:
    section = (DOCS / "mixers.md").read_text(encoding="utf-8").split(f"\n## `{name}`\n")[1]
    section = section.split("\n## ")[0]
    assert "arXiv:" in section
    assert "\n    " in section, "equations are indented by four spaces"
    assert f"(images/mixers/{name}.png)" in section
    assert (DOCS / "images" / "mixers" / f"{name}.png").stat().st_size > 1_000


@pytest.mark.parametrize("context", [5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_are_those_of_a_hand_count(context: int, dtype: torch.dtype) -> None:
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
        ("mamba", {"state_dim": 16, "expand": 2, "conv": 4}, 4 * 2 * D * 16 + 3 * 2 * D * c),
        ("rwkv_channel", {}, D * c),
    ]
    for name, fields, expected in cases:
        assert state_bytes(make_config(name, D, fields), context, dtype) == expected, name


def test_parameters_are_made_by_the_mixer_alone() -> None:
    """The meta device counts what is there: no mixer builds tensors elsewhere."""
    for name in mixer_names():
        with torch.device("meta"):
            module = load_mixer(name)(make_config(name, 64, {}))
        assert all(parameter.is_meta for parameter in module.parameters()), name
