"""Everything that is to be known of the kernels on a card, in one call.

    python benchmarks/kernels.py [--out FILE] [--only WORD] [--commit HASH] [--skip-check]

First each Triton backend is compared with its reference in every dtype, forward and every gradient,
as a trial does before it trusts one; then `archsearch bench kernels`. Needs torch and Triton alone,
and times peers that are installed.
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from archsearch_kernels import families

from archsearch.bench_kernels import bench_values
from archsearch.kernel_check import HEAD_SIZES, KernelVerdict, check

ROOT = Path(__file__).resolve().parent.parent
CHECKED = {torch.bfloat16: HEAD_SIZES, torch.float16: (16,), torch.float32: (16,)}
"""Head sizes by dtype. Programs for fp32 and for keys of more than 16 numbers compile slowly."""


def verdicts(device: str) -> list[KernelVerdict]:
    """Each backend that is a Triton program, in each dtype."""
    found = []
    for one in families():
        if "triton" in one.backends_on(device) and "triton" not in one.borrowed:
            for dtype, head_sizes in CHECKED.items():
                found.append(check(one, "triton", device, head_sizes, dtype))
                print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    results = ROOT / "benchmarks" / "results" / "kernels.json"
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--only", default="")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--skip-check", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checked = [] if given.skip_check else verdicts(device)
    values = bench_values(device, given.only, partial(print, flush=True))
    values["checks"] = [asdict(one) for one in checked]
    values["commit"] = given.commit or values["commit"]
    given.out.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
