"""Our kernels, peers that are installed, and the floor: times with correctness beside each.

All contenders of a case run in one process, in turn, on the same kind of inputs. The floor is what
the case's bytes and FLOPs take at the copy and product rates measured in the same run. Each result
that was timed is compared with `truth`; what differs by more than a hundredth has no ratio printed.
A contender that cannot run says why. Knows nothing of studies.
"""

import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archsearch import __version__
from archsearch.bench_kernels.cases import Case, cases, inputs
from archsearch.bench_kernels.contenders import Contender, contenders
from archsearch.bench_kernels.timing import Ready, ceilings, medians_ms, ready
from archsearch.bench_kernels.truth import ALLOWED, error
from archsearch.device import device_model
from archsearch.errors import UsageError

_LIBRARIES = ("torch", "triton", "flash-linear-attention", "fla-core")


def bench_values(
    device: str, only: str = "", told: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Time every case whose name contains `only`; on a CPU, small versions of them.

    Args:
        told: gets the lines of each case as soon as it is done.

    Raises:
        UsageError: no such device, or no case is meant.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda, but torch finds no CUDA device; accepted: cpu")
    wanted = [case if device == "cuda" else case.tiny() for case in cases()]
    wanted = [case for case in wanted if only in case.name]
    if not wanted:
        names = "; ".join(case.name for case in cases())
        raise UsageError(f"no case contains '{only}'; there are: {names}")
    rates = ceilings(device)
    rows = []
    for case in wanted:
        rows.append(_row(case, rates, device))
        told(row_text(rows[-1]))
    return {
        "benchmark": "kernels",
        "dtype": "bfloat16",
        "device": device_model(device),
        "versions": {"archsearch": __version__, **_versions()},
        "commit": _commit(),
        "ceilings": rates,
        "allowed_error": ALLOWED,
        "rows": rows,
    }


def bench_text(values: Mapping[str, Any]) -> str:
    """The same for people."""
    rates = values["ceilings"]
    first = (
        f"{values['device']}, {values['dtype']}; copy {rates['bytes_per_second'] / 1e12:.2f} TB/s, "
        f"product {rates['flops_per_second'] / 1e12:.0f} TFLOP/s"
    )
    return "\n".join((first, *map(row_text, values["rows"])))


def row_text(row: Mapping[str, Any]) -> str:
    """One case: its floor, and a line a contender with what it takes more than the fastest of ours.

    There is no ratio beside a wrong result, and none at all if ours is wrong.
    """
    right = [one for one in row["contenders"] if one["ok"] and one["is_ours"]]
    best = min((one["ms"] for one in right), default=None)
    lines = [f"{row['case']}: floor {row['floor_ms']:.4f} ms, bound by {row['bound_by']}"]
    for one in row["contenders"]:
        if one["ms"] is None:
            lines.append(f"  {one['name']:<40} cannot run: {one['failure']}")
            continue
        verdict = f"error {one['error']:.1e}" + " WRONG" * (not one["ok"])
        ratio = "" if best is None or not one["ok"] else f"  {one['ms'] / best:8.2f} x ours"
        plain = "" if one["is_captured"] else "  (not captured)"
        lines.append(f"  {one['name']:<40} {one['ms']:10.4f} ms  {verdict}{ratio}{plain}")
    return "\n".join(lines)


def _row(case: Case, rates: Mapping[str, float], device: str) -> dict[str, Any]:
    by_bytes = case.bytes(2) / rates["bytes_per_second"] * 1e3
    by_flops = case.flops() / rates["flops_per_second"] * 1e3
    entries: dict[str, dict[str, Any]] = {}
    variants: dict[str, Ready] = {}
    for one in contenders(case, device):
        entries[one.name] = {"name": one.name, "computes": one.computes, "is_ours": one.is_ours}
        try:
            variants[one.name], found = _prepare(one, device)
        except (
            Exception
        ) as failure:  # a peer's compiler, driver or shape check raises what it likes
            entries[one.name] |= {"ms": None, "ok": False, "failure": _first_line(failure)}
            continue
        entries[one.name] |= {"error": found, "ok": found <= ALLOWED}
        entries[one.name]["is_captured"] = variants[one.name].is_captured
    for name, ms in medians_ms(variants, device).items():
        entries[name]["ms"] = ms
    if device == "cuda":
        torch.cuda.empty_cache()
    return {
        "case": case.name,
        "floor_ms": max(by_bytes, by_flops),
        "bound_by": "bytes" if by_bytes > by_flops else "products",
        "contenders": list(entries.values()),
    }


def _prepare(one: Contender, device: str) -> tuple[Ready, float]:
    given = inputs(one.case, torch.bfloat16, device)
    if one.case.work != "training":
        with torch.no_grad():
            variant = ready(lambda: one.call(given), device)
        return variant, error(one.case, one.computes, given, variant.results)
    leaves = {name: x.requires_grad_() for name, x in given.items() if name in one.case.leaves}

    def work() -> tuple[Tensor, ...]:
        (y,) = one.call(leaves)
        return y.detach(), *torch.autograd.grad(y, list(leaves.values()), given["dy"])

    variant = ready(work, device)
    given = {name: x.detach() for name, x in given.items()}
    return variant, error(one.case, one.computes, given, variant.results)


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0][:200]}"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    """The commit of the source, where it is run from a repository."""
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        said = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return said.stdout.strip() or None
