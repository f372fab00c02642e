"""Compiles the Triton programs for a Hopper GPU, without one, and asks ptxas what they need.

    python compiled.py RESULTS [--only WORD]

Each case calls a kernel's own launching code with tensors that have no storage; a stand-in for the
driver makes each launch a compilation. So programs are specialised as real calls specialise them.
RESULTS gets a JSON list with registers, spilled bytes and shared bytes of each program, and whether
ptxas runs its matrix products one after the other (C7510, C7514), which costs 10 to 40 %.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from archsearch_kernels.head_loss import triton as head
from archsearch_kernels.taylor_linear_attention import launches
from archsearch_kernels.taylor_linear_attention import triton as taylor
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)


class NoDevice:
    """What launching code asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(call: Callable[[], object]) -> Iterator[tuple[str, Any]]:
    """The programs that a call launches, by name."""
    launched, run = [], JITFunction.run

    def compile_only(self: Any, *args: Any, **given: Any) -> Any:
        kernel = run(self, *args, **{**given, "warmup": True})
        launched.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    try:
        call()
    finally:
        JITFunction.run = run
    yield from launched


def report(kernel: Any) -> dict[str, Any]:
    """What ptxas says of one program."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.ptx")
        source.write_text(kernel.asm["ptx"])
        said = subprocess.run(
            [
                knobs.nvidia.ptxas.path,
                "-v",
                "--gpu-name=sm_90a",
                str(source),
                "-o",
                f"{folder}/out",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    stores, loads = map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[-1]),
        "spilled_bytes": max(stores, loads),
        "shared_bytes": kernel.metadata.shared,
        "matrix_products": len(re.findall(r"wgmma\.mma_async", kernel.asm["ptx"])),
        "serialised": "C7510" in said or "C7514" in said,
    }


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def taylor_call(
    B: int, T: int, H: int, K: int, V: int, state: bool = False, masked: bool = False
) -> dict[str, Callable[[], object]]:
    """Forward and backward pass, and a step, of one shape."""
    q, k, v = empty(B, T, H, K), empty(B, T, H, K), empty(B, T, H, V)
    F = launches.layout(K).features
    memory, normaliser = (
        empty(B, H, F, V, dtype=torch.float32),
        empty(B, H, F, dtype=torch.float32),
    )
    exists = empty(B, T, dtype=torch.bool) if masked else None
    given = (q, k, v, exists, *((memory, normaliser) if state else (None, None)))
    denominator, gradients = empty(B, T, H, dtype=torch.float32), (memory, normaliser)
    return {
        "forward": lambda: taylor.forward._init_fn(*given, state),
        "backward": lambda: taylor.backward._init_fn(
            *given, v, denominator, v, *(gradients if state else (None, None))
        ),
        "prefix": lambda: taylor.prefix._init_fn(k, v, exists, None),
        "prefix_backward": lambda: taylor.prefix_backward._init_fn(k, v, exists, None, *gradients),
        "step": lambda: taylor.one_token._init_fn(q[:, 0], k[:, 0], v[:, 0], memory, normaliser),
    }


def head_call(M: int, N: int, V: int, D: int) -> dict[str, Callable[[], object]]:
    hidden, head_MVD = empty(M, N, D), empty(M, V, D)
    labels, loss = empty(N, dtype=torch.int64), empty(M, dtype=torch.float32)
    log_total = empty(M, N, dtype=torch.float32)
    return {
        "forward": lambda: head._forward._init_fn(hidden, head_MVD, labels, None),
        "backward": lambda: head._backward._init_fn(
            hidden, head_MVD, labels, None, log_total, loss
        ),
        "hits": lambda: head._hits._init_fn(hidden, head_MVD, labels),
    }


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every configuration of the tables, at the shapes that it is made for."""
    shapes = {
        "K16 V64": taylor_call(16, 32_768, 16, 16, 64),
        "K16 V64 parts": taylor_call(1, 131_072, 16, 16, 64),
        "K16 V64 state": taylor_call(16, 4_096, 16, 16, 64, state=True),
        "K16 V64 masked": taylor_call(16, 4_096, 16, 16, 64, masked=True),
        "K8 V64": taylor_call(16, 4_096, 16, 8, 64),
        "K24 V128": taylor_call(16, 4_096, 16, 24, 128),
        "K32 V64": taylor_call(16, 4_096, 16, 32, 64),
    }
    for shape, calls in shapes.items():
        for name, call in calls.items():
            yield f"taylor {name} {shape}", call
    for width in head.FORWARD:
        for name, call in head_call(16, 16_384, 8_192, width).items():
            yield f"head {name} D{width}", call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    driver.set_active(NoDevice())
    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for name, call in cases():
        if given.only in name:
            for program, kernel in compiled(call):
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    found[f"{name}: {program}"] = report(kernel)
                    print(f"{name}: {program}", found[f"{name}: {program}"], flush=True)
    given.results.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
