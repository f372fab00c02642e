"""The population's head: loss and both gradients, and hits, against plain torch and the floor.

    python benchmarks/head_loss.py [--out FILE] [--commit HASH]

bf16 on a CUDA device, V = 8,192, the labelled rows of the recipe `zoology-figure2`. Every variant
is captured in a CUDA graph; the variants of a shape take turns, and a number is the median over
rounds. `torch` is cross_entropy of all logits in fp32. The floor counts the four products that a
pass without stored logits makes (one for hits) at the card's measured bf16 rate. A loss or gradient
that differs from that of `torch` by more than 1 % is refused; hits are not compared, because those
of `torch` are of logits rounded to bf16. Prints a table and writes JSON.

Shape suffixes: M members, N labelled rows, D width, V vocabulary.
"""

import argparse
import json
import math
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from archsearch_kernels.head_loss import head_loss, hits
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
V = 8_192
MEMBERS, ROWS, WIDTHS = (1, 4, 16), (256 * 4, 256 * 16, 256 * 64), (64, 128)
PEAK_FLOPS = 790e12
"""Of a large bf16 product of random matrices on an H200."""
ROUNDS = 15
SAMPLE_MS = 2.0
"""A sample repeats short work until it takes about this long."""


def plain_loss(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor) -> Tensor:
    logits_MNV = torch.bmm(hidden_MND, head_MVD.mT).float()
    labels = labels_N.repeat(len(hidden_MND))
    losses = F.cross_entropy(logits_MNV.flatten(0, 1), labels, reduction="none")
    return losses.view(len(hidden_MND), -1).mean(1)


def plain_hits(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor) -> Tensor:
    return (torch.bmm(hidden_MND, head_MVD.mT).argmax(-1) == labels_N).sum(1)


def losses() -> dict[str, Callable[..., Tensor]]:
    def with_backend(backend: str) -> Callable[..., Tensor]:
        return lambda h, e, y: head_loss(h, e, labels_N=y, backend=backend)

    return {
        "torch": plain_loss,
        "blocked": with_backend("blocked"),
        "triton": with_backend("triton"),
    }


def counts() -> dict[str, Callable[..., Tensor]]:
    return {
        "torch": plain_hits,
        "blocked": lambda h, e, y: hits(h, e, y, backend="blocked"),
        "triton": lambda h, e, y: hits(h, e, y, backend="triton"),
    }


def inputs(members: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    hidden_MND = normal(members, rows, width)
    head_MVD = normal(members, V, width) / 4  # logits of size 2 to 3
    labels_N = torch.randint(0, V, (rows,), generator=generator, device="cuda")
    return hidden_MND.requires_grad_(), head_MVD.requires_grad_(), labels_N


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any, float]:
    """The graph of some work, its results, and the GB that it needs beside its inputs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    graph.replay()
    torch.cuda.synchronize()
    return graph, results, (torch.cuda.max_memory_allocated() - before) / 1e9


def sample_ms(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def medians_ms(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    repeats = {name: math.ceil(SAMPLE_MS / sample_ms(graph, 2)) for name, graph in graphs.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            samples[name].append(sample_ms(graph, repeats[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def differs(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return any(
        not float((a.float() - b.float()).norm()) <= 0.01 * float(b.float().norm())
        for a, b in zip(found, wanted, strict=True)
    )


def compare(
    what: str,
    variants: dict[str, Callable[..., Tensor]],
    shape: tuple[int, int, int],
    products: int,
) -> dict[str, Any]:
    """One row: times in ms, memory in GB, and the floor."""
    given = inputs(*shape)

    def work(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        if what == "hits":
            with torch.no_grad():
                return (function(*given),)
        loss_M = function(*given)
        return loss_M.detach(), *torch.autograd.grad(loss_M.sum(), given[:2])

    graphs, results, memory = {}, {}, {}
    for name, function in variants.items():
        graphs[name], results[name], gigabytes = captured(lambda f=function: work(f))
        memory[name] = round(gigabytes, 3)
    refused = (
        [] if what == "hits" else [n for n in variants if differs(results[n], results["torch"])]
    )
    if refused:
        raise SystemExit(f"{', '.join(refused)}: results differ from torch's at {shape}")
    M, N, D = shape
    return {
        "what": what,
        "members": M,
        "rows": N,
        "width": D,
        "floor_ms": products * 2 * M * N * V * D / PEAK_FLOPS * 1e3,
        "ms": medians_ms(graphs),
        "gigabytes": memory,
    }


def line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {ms:8.3f}" for name, ms in row["ms"].items())
    best = row["floor_ms"] / row["ms"]["triton"]
    shape = f"M={row['members']:2d} N={row['rows']:5d} D={row['width']:3d}"
    return f"{row['what']:4s} {shape}  {times}  floor {row['floor_ms']:7.3f} ms  ({best:.0%} of it)"


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "head_loss.json"
    )
    parser.add_argument("--commit", default=None)
    given = parser.parse_args()
    rows = []
    for what, variants, products in (("loss", losses(), 4), ("hits", counts(), 1)):
        for width in WIDTHS:
            for members in MEMBERS:
                for labelled in ROWS:
                    rows.append(compare(what, variants, (members, labelled, width), products))
                    print(line(rows[-1]), flush=True)
                    torch.cuda.empty_cache()
    result = {
        "benchmark": "head_loss",
        "vocabulary": V,
        "dtype": "bfloat16",
        "peak_flops": PEAK_FLOPS,
        "rows": rows,
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "commit": given.commit or commit(),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
