"""The benchmark of kernels: its truth sees a wrong result, its floor is the formula's, no ratio for
what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from archsearch.bench_kernels import bench_values, row_text
from archsearch.bench_kernels.cases import Case, cases, inputs
from archsearch.bench_kernels.contenders import Contender, contenders
from archsearch.bench_kernels.timing import ready
from archsearch.bench_kernels.truth import ALLOWED, error
from archsearch.cli import app
from archsearch.errors import UsageError

TINY = {case.name: case for case in map(Case.tiny, cases())}


def results(one: Contender, change: Callable[[Tensor], Tensor], which: int) -> list[Tensor]:
    """What a contender returns on the CPU, one of its results changed."""
    given = inputs(one.case, torch.bfloat16, "cpu")
    if one.case.work == "training":
        leaves = {name: given[name].requires_grad_() for name in one.case.leaves}
        (y,) = one.call(leaves)
        found = [y.detach(), *torch.autograd.grad(y, list(leaves.values()), given["dy"])]
    else:
        found = list(one.call(given))
    found[which] = change(found[which])
    return found


def error_of(one: Contender, found: list[Tensor]) -> float:
    return error(one.case, one.computes, inputs(one.case, torch.bfloat16, "cpu"), found)


@pytest.mark.parametrize("name", TINY)
def test_the_truth_is_what_every_contender_computes(name: str) -> None:
    found = [one for one in contenders(TINY[name], "cpu") if one.is_ours]
    assert found
    for one in found:
        assert error_of(one, results(one, lambda x: x, 0)) < ALLOWED / 2


@pytest.mark.parametrize("name", TINY)
def test_two_percent_are_seen_in_every_result(name: str) -> None:
    one = next(iter(contenders(TINY[name], "cpu")))
    count = {"training": 1 + len(one.case.leaves), "step": 3}.get(one.case.work, 1)
    for which in range(count):
        assert error_of(one, results(one, lambda x: x * 1.02, which)) > ALLOWED


def test_a_wrong_last_head_and_no_numbers_are_seen() -> None:
    one = next(iter(contenders(TINY[next(iter(TINY))], "cpu")))

    def last_head(y: Tensor) -> Tensor:
        return torch.cat((y[:, :, :-1], y[:, :, -1:] * 1.1), 2)

    assert error_of(one, results(one, last_head, 0)) > ALLOWED
    assert error_of(one, results(one, lambda y: y * torch.nan, 0)) == torch.inf


def test_floors_count_every_number_once() -> None:
    forward = Case(mixing="taylor", work="forward", batch=16, tokens=32_768)
    rows = 16 * 32_768 * 16
    assert forward.bytes(2) == rows * 320
    assert forward.flops() == rows * (2 * 64 * 80 + 4 * 153 * 65)
    step = Case(mixing="taylor", work="step", batch=128, tokens=1)
    assert step.bytes(2) == 128 * 16 * (2 * 4 * 153 * 65 + 2 * 160)
    window = next(case for case in cases() if case.window == 512)
    assert window.flops() == 8 * 4_096 * 16 * 2 * 512 * 128 * 3.5
    assert replace(window, work="forward").flops() == window.flops() / 3.5


def test_the_floor_of_a_convolution_is_its_bytes() -> None:
    floors = {c.name: c.bytes(2) / (8 * 4_096 * 1_024 * 2) for c in cases() if c.taps}
    sizes = "8 x 4096 x 1024"
    assert floors == {
        f"conv_silu 4 forward {sizes}": 2,
        f"conv_silu 4 training {sizes}": 5,
        f"conv_gate 3 training {sizes}": 8,
    }


def test_shapes_are_those_of_the_table() -> None:
    names = " ".join(case.name for case in cases())
    for tokens in (2_048, 8_192, 16_384, 32_768):
        assert f"taylor forward 16 x {tokens} x 16 x (16, 64)" in names
    for other in ("taylor prefix 16 x 32768", "taylor forward 1 x 131072", "taylor step 128 x 1"):
        assert other in names
    assert [case.window for case in cases() if case.window] == [64, 512, 2_048]


def row(**wrong: bool) -> dict[str, object]:
    def entry(name: str, ms: float) -> dict[str, object]:
        right = not wrong.get(name.partition(" ")[0], False)
        return {
            "name": name,
            "is_ours": name.startswith("archsearch"),
            "ms": ms,
            "ok": right,
            "error": 0.001 if right else 0.5,
            "is_captured": True,
        }

    failed = {"name": "other", "is_ours": False, "ms": None, "ok": False, "failure": "no card"}
    contenders = [entry("archsearch triton", 2.0), entry("fla based", 9.0), failed]
    return {"case": "taylor", "floor_ms": 1.0, "bound_by": "bytes", "contenders": contenders}


def test_no_ratio_stands_beside_a_wrong_result() -> None:
    right = row_text(row())
    assert "4.50 x ours" in right and "WRONG" not in right
    assert "cannot run: no card" in right
    theirs = row_text(row(fla=True))
    assert "4.50" not in theirs and theirs.count("WRONG") == 1
    ours = row_text(row(archsearch=True))
    assert "x ours" not in ours and ours.count("WRONG") == 1


def test_a_contender_that_fails_says_why_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from archsearch import bench_kernels

    def fails(given: object) -> tuple[Tensor, ...]:
        raise RuntimeError("not for this card\nand more")

    def with_a_failure(case: Case, device: str) -> list[Contender]:
        found = list(contenders(case, device))
        return [*found, replace(found[0], name="broken", call=fails)]

    monkeypatch.setattr(bench_kernels, "contenders", with_a_failure)
    values = bench_values("cpu", "taylor step")
    ours, broken = values["rows"][0]["contenders"]
    assert ours["ok"] and ours["ms"] > 0
    assert broken["failure"] == "RuntimeError: not for this card" and broken["ms"] is None


def test_the_command_says_it_in_words_and_in_json(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    given = ["bench", "kernels", "--device", "cpu", "--only", "window 16"]
    said = CliRunner().invoke(app, [*given, "--out", str(out)])
    assert said.exit_code == 0 and "archsearch blocked" in said.output
    values = json.loads(out.read_text())
    assert values["benchmark"] == "kernels" and values["versions"]["torch"] == torch.__version__
    assert {"device", "commit", "ceilings"} <= values.keys()
    plain = CliRunner().invoke(app, [*given, "--json"])
    assert json.loads(plain.stdout)["rows"][0]["contenders"][0]["ok"]


@pytest.mark.parametrize(
    ("given", "said"),
    [(["--device", "tpu"], "cuda, cpu"), (["--device", "cpu", "--only", "gla"], "taylor prefix")],
)
def test_a_wrong_option_says_what_is_accepted(given: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *given])
    assert result.exit_code == 2
    assert said in result.output


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="accepted: cpu"):
        bench_values("cuda")


def test_work_is_done_before_it_is_timed() -> None:
    calls: list[int] = []

    def work() -> tuple[Tensor, ...]:
        calls.append(1)
        return (torch.zeros(1),)

    assert not ready(work, "cpu").is_captured and calls == [1]
