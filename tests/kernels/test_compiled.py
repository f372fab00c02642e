"""The Triton programs stay within their budget on a Hopper GPU: compiled, not run.

A handful of registers too many and ptxas runs all matrix products one after the other, or spills in
the innermost loop. Neither is seen by a test of results.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BUDGET = json.loads((HERE / "compiled.json").read_text())
"""What `compiled.py` wrote when the programs were last measured."""

SLACK_BYTES = 64
"""Spilled bytes that another patch of the compiler may cost."""


def compile_all(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    results = folder / "compiled.json"
    subprocess.run(
        [sys.executable, str(HERE / "compiled.py"), str(results), *arguments],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    programs: dict[str, dict[str, Any]] = json.loads(results.read_text())["programs"]
    return programs


def faults(found: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """What a program takes too much of."""
    more = [name for name in ("registers", "shared_bytes") if found[name] > budget[name]]
    if found["spilled_bytes"] > budget["spilled_bytes"] + SLACK_BYTES:
        more.append("spilled_bytes")
    return more + ["serialised"] * found["serialised"]


def test_programs_stay_within_their_budget(tmp_path: Path) -> None:
    found = compile_all(tmp_path)
    assert found.keys() == BUDGET["programs"].keys()
    over = {
        name: [(what, one[what], BUDGET["programs"][name][what]) for what in wrong]
        for name, one in found.items()
        if (wrong := faults(one, BUDGET["programs"][name]))
    }
    assert not over, (
        f"more than the budget, which was recorded by triton {BUDGET['triton']}: {over}"
    )


def test_nothing_in_the_budget_is_serialised() -> None:
    assert not [name for name, one in BUDGET["programs"].items() if one["serialised"]]


def test_a_program_with_too_many_registers_is_found(tmp_path: Path) -> None:
    (found,) = compile_all(tmp_path, "--planted").values()
    assert "spilled_bytes" in faults(found, BUDGET["programs"]["taylor forward K16 V64: outputs"])


@pytest.mark.parametrize("code", ["C7510", "C7514"])
def test_serialised_products_are_read_from_what_ptxas_says(code: str) -> None:
    sys.path.insert(0, str(HERE))
    try:
        from compiled import needs
    finally:
        sys.path.remove(str(HERE))
    said = (
        f"info  ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    budget = {"registers": 168, "spilled_bytes": 12, "shared_bytes": 0}
    found = needs(said) | {"shared_bytes": 0}
    assert found == {**budget, "serialised": True}
    assert faults(found, budget) == ["serialised"]
