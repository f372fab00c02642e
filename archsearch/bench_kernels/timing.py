"""Times of several variants in turn, by CUDA graphs and events on a GPU, by the clock on a CPU.

Variants take turns and a time is the median over rounds, so that a change of clock or a neighbour
meets all of them alike. A variant that cannot be captured is launched plainly, and says so.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUNDS = 15
SAMPLE_MS = 2.0
"""A sample repeats short work until it takes about this long."""


@dataclass(frozen=True)
class Ready:
    """A variant that has run once: how to run it again, and what it returned then.

    `work` is kept for its inputs, which a graph reads and does not own.
    """

    work: Callable[[], tuple[Tensor, ...]]
    run: Callable[[], Any]
    results: tuple[Tensor, ...]
    is_captured: bool


def ready(work: Callable[[], tuple[Tensor, ...]], device: str) -> Ready:
    """Run a variant once, and capture it in a CUDA graph if that can be."""
    if device != "cuda":
        return Ready(work, work, work(), False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles, and tunes where a peer tunes itself
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = work()
    except RuntimeError:  # what a peer does inside cannot be captured
        torch.cuda.synchronize()
        return Ready(work, work, work(), False)
    graph.replay()
    torch.cuda.synchronize()
    return Ready(work, graph.replay, results, True)


def medians_ms(variants: Mapping[str, Ready], device: str) -> dict[str, float]:
    """Median time of each variant."""
    repeats = {
        name: max(1, math.ceil(SAMPLE_MS / max(1e-4, _sample_ms(one, 2, device))))
        for name, one in variants.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS if device == "cuda" else 3):
        for name, one in variants.items():
            samples[name].append(_sample_ms(one, repeats[name], device))
    return {name: statistics.median(found) for name, found in samples.items()}


def ceilings(device: str) -> dict[str, float]:
    """Bytes a second of a copy, read and written, and FLOPs a second of a large bf16 product."""
    size, side = (1 << 31, 8_192) if device == "cuda" else (1 << 22, 256)
    given, copy = torch.zeros(2, size // 2, dtype=torch.uint8, device=device).unbind()
    # Random numbers: products of zeros draw less power, and clocks stay higher.
    a, b = torch.randn(2, side, side, device=device).bfloat16().unbind()
    out = torch.empty_like(a)
    variants = {
        "copy": ready(lambda: (copy.copy_(given),), device),
        "product": ready(lambda: (torch.mm(a, b, out=out),), device),
    }
    ms = medians_ms(variants, device)
    return {
        "bytes_per_second": size / ms["copy"] * 1e3,
        "flops_per_second": 2 * side**3 / ms["product"] * 1e3,
    }


def _sample_ms(one: Ready, repeats: int, device: str) -> float:
    if device != "cuda":
        begun = time.perf_counter()
        for _ in range(repeats):
            one.run()
        return (time.perf_counter() - begun) * 1e3 / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        one.run()
    end.record()
    torch.cuda.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / repeats
