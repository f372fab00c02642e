"""Times the Triton programs of sliding-window attention with blocks of many sizes, on a GPU.

    python benchmarks/window_blocks.py RESULTS [--heads 16] [--batch 8] [--tokens 4096] [--size 64]

For each window and pass, every candidate runs on the same inputs; its time is the median of several
rounds in turn, and its results are compared with those of the blocks in the tables. The tables in
`archsearch_kernels.sliding_window.triton` are written from it by hand. Imports the kernels alone.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from archsearch_kernels.sliding_window import triton as ops
from archsearch_kernels.sliding_window.triton import Blocks, Cut
from torch import Tensor

WINDOWS = (64, 128, 256, 512, 2_048)
PASSES = ("forward", "of_queries", "of_keys")
ROUNDS, REPEATS = 9, 5
CLOSE = 0.02
"""Another order of blocks rounds other weights: bf16 has 8 bits."""


def candidates(name: str) -> list[Blocks]:
    """Queries and keys of a block, warps, stages."""
    sizes = [(64, 64, 4), (128, 64, 4), (128, 64, 8), (64, 128, 8), (64, 32, 4), (128, 128, 8)]
    if name == "of_keys":  # accumulators have a row for each key
        sizes = [(64, 64, 4), (32, 64, 4), (64, 128, 8), (32, 128, 8), (32, 128, 4), (128, 64, 4)]
    return [Blocks(*size, stages) for size in sizes for stages in (1, 2, 3)]


def inputs(given: argparse.Namespace) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (given.batch, given.tokens, given.heads, given.size)
    return tuple(
        torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4)
    )


def tables_of(name: str, blocks: Blocks | None) -> None:
    """Have one pass cut so; None: as the tables say."""
    ops.Launch.cut = CUT if blocks is None else lambda self: CUT(self)._replace(**{name: blocks})  # type: ignore[method-assign]


CUT: Callable[[ops.Launch], Cut] = ops.Launch.cut


def work(name: str, tensors: tuple[Tensor, ...], window: int) -> Callable[[], tuple[Tensor, ...]]:
    """One pass alone: the two of the backward have programs of their own."""
    q, k, v, dy = tensors
    if name == "forward":
        return lambda: ops.forward(q, k, v, None, window)
    tables_of(name, None)
    y, log_total = ops.forward(q, k, v, None, window)
    launch = ops.Launch(q, k, v, None, window)
    dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, log_total))
    ops.query_gradients(launch, dy, y, log_total, delta, dq)

    def run() -> tuple[Tensor, ...]:
        if name == "of_queries":
            ops.query_gradients(launch, dy, y, log_total, delta, dq)
            return (dq,)
        ops.key_gradients(launch, dy, log_total, delta, dk, dv)
        return dk, dv

    return run


def compile_one(name: str, blocks: Blocks, window: int, given: argparse.Namespace) -> str:
    """Fill the cache of compiled programs; return what went wrong."""
    try:
        run = work(name, inputs(given), window)
        tables_of(name, blocks)
        run()
        torch.cuda.synchronize()
    except Exception as error:  # a compiler raises what it likes; too large is one of its answers
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def time_ms(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS


def compare(name: str, window: int, given: argparse.Namespace, fine: list[Blocks]) -> Any:
    run = work(name, inputs(given), window)
    tables_of(name, None)
    wanted = [x.clone() for x in run()]
    samples: dict[Blocks, list[float]] = {blocks: [] for blocks in fine}
    errors = {}
    for _ in range(ROUNDS):
        for blocks in fine:
            tables_of(name, blocks)
            if blocks not in errors:
                pairs = zip(run(), wanted, strict=True)
                errors[blocks] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
            samples[blocks].append(time_ms(run))
    medians = sorted((statistics.median(each), blocks) for blocks, each in samples.items())
    return [
        {"blocks": [*blocks], "ms": round(ms, 4), "close": errors[blocks] < CLOSE}
        for ms, blocks in medians
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    for name, default in (("batch", 8), ("tokens", 4_096), ("heads", 16), ("size", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    jobs = [(n, b, w) for n in PASSES for b in candidates(n) for w in (64, 2_048)]
    with ProcessPoolExecutor(12, get_context("spawn")) as pool:
        said = list(pool.map(compile_one, *zip(*jobs, strict=True), [given] * len(jobs)))
    wrong = {job[:2]: text for job, text in zip(jobs, said, strict=True) if text}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "shape": vars(given) | {}}
    found |= {"refused": {f"{n} {[*b]}": text for (n, b), text in wrong.items()}, "passes": {}}
    for window in WINDOWS:
        for name in PASSES:
            fine = [b for b in candidates(name) if (name, b) not in wrong]
            best = compare(name, window, given, fine)
            found["passes"][f"{name}, window {window}"] = best
            print(name, window, *(f"{x['blocks']} {x['ms']}" for x in best[:4]), flush=True)
    found["shape"].pop("results")
    given.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
