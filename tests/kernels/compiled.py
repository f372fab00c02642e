"""Compiles the Triton programs for a Hopper GPU, without one, and asks ptxas what they need.

    python compiled.py RESULTS [--all]

Each case calls a kernel's own launching code with tensors that have no storage; a stand-in for the
driver makes each launch a compilation. So programs are specialised as real calls specialise them.
RESULTS gets a JSON object: registers, spilled bytes and shared bytes of each program, and whether
ptxas runs its matrix products one after the other (C7510, C7514), which costs 10 to 40 %.
`tests/kernels/compiled.json` is such a file, the budget that test_compiled.py holds programs to;
write it anew after a change that is worth its cost. --all compiles many more configurations.
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
import triton
from archsearch_kernels.embed_norm import triton as embedding
from archsearch_kernels.head_loss import triton as head
from archsearch_kernels.residual_norm import triton as norm
from archsearch_kernels.short_conv import triton as conv
from archsearch_kernels.sliding_window import triton as window
from archsearch_kernels.taylor_linear_attention import launches, shapes, short
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
    return needs(said) | {"shared_bytes": kernel.metadata.shared}


def needs(said: str) -> dict[str, Any]:
    """Read what ptxas -v prints."""
    stores, loads = map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[-1]),
        "spilled_bytes": max(stores, loads),
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
        "short": lambda: short.forward._init_fn(q[:, :256], k[:, :256], v[:, :256], exists, None),
        "short backward": lambda: short.backward._init_fn(
            *(x[:, :256] for x in (q, k, v)),
            exists,
            None,
            *(x[:, :256] for x in (v, denominator, v)),
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


def entry_call(M: int, N: int, V: int, D: int) -> dict[str, Callable[[], object]]:
    """What stands between the mixers, as views of a buffer give it: members lie apart."""
    r, table, weight = empty(M, N, D), empty(M, V, D), empty(M, 2 * D)[:, :D]
    tokens, keys = (empty(size, dtype=torch.int64) for size in (N, M))
    return {
        "norm forward": lambda: norm.forward._init_fn(r, r, weight, weight),
        "norm backward": lambda: norm.backward._init_fn(r, r, r, weight, True),
        "rms norm backward": lambda: norm.backward._init_fn(r, r, r, weight, False),
        "embedding forward": lambda: embedding.forward._init_fn(
            tokens, table, weight, weight, keys, 0.1
        ),
        "embedding backward": lambda: embedding.gradient._init_fn(tokens, r, keys, 0.1, V),
    }


def window_call(
    B: int, T: int, H: int, G: int, K: int, seen: int, S: int | None = None, masked: bool = False
) -> dict[str, Callable[[], object]]:
    """Forward and backward pass of one shape."""
    q, k = empty(B, T, H, K), empty(B, S or T, G, K)
    exists = empty(B, S or T, dtype=torch.bool) if masked else None
    log_total = empty(B, H, T, dtype=torch.float32)
    return {
        "forward": lambda: window.forward._init_fn(q, k, k, exists, seen),
        "backward": lambda: window.backward._init_fn(q, k, k, exists, q, log_total, q, seen),
    }


def window_cases(wants_all: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    sizes = {
        "w64": window_call(8, 4_096, 16, 16, 64, 64),
        "w2048": window_call(8, 4_096, 16, 16, 64, 2_048),
    }
    if wants_all:
        for K in (16, 32, 48, 80, 128, 256):
            sizes[f"w64 K{K}"] = window_call(8, 4_096, 16, 16, K, 64)
            sizes[f"w512 K{K}"] = window_call(8, 4_096, 16, 16, K, 512)
        sizes["w64 groups"] = window_call(8, 4_096, 16, 4, 64, 64)
        sizes["w512 masked"] = window_call(8, 4_096, 16, 4, 64, 512, masked=True)
        sizes["one query"] = window_call(8, 1, 16, 4, 64, 512, 512, masked=True)
    for size, calls in sizes.items():
        yield from ((f"window {name} {size}", call) for name, call in calls.items())


def conv_call(
    B: int, T: int, C: int, J: int, members: int = 1, tail: bool = False
) -> dict[str, Callable[[], object]]:
    """Both passes with SiLU, gate and residual; with a tail too."""
    x, weight, bias = empty(B, T, C), empty(members, C, J), empty(members, C)
    given = (x, weight, bias, x, empty(B, J - 1, C) if tail else None)
    return {
        "forward": lambda: conv.forward._init_fn(*given, True, True),
        "backward": lambda: conv.backward._init_fn(*given, x, True, True),
    }


def cases(wants_all: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is compiled: with `wants_all`, every configuration of the tables."""
    usual = taylor_call(16, 32_768, 16, 16, 64)
    parts = taylor_call(1, 131_072, 16, 16, 64)
    state = taylor_call(16, 4_096, 16, 16, 64, state=True)
    small, large = taylor_call(16, 4_096, 16, 8, 64), taylor_call(16, 4_096, 16, 32, 64)
    yield from ((f"taylor {name} K16 V64", call) for name, call in usual.items())
    yield "taylor forward K16 V64, parts", parts["forward"]
    yield "taylor forward K16 V64, state", state["forward"]
    wide = taylor_call(4_096, 256, 1, 16, 128)
    yield "taylor short K16 V128", wide["short"]
    yield "taylor short backward K16 V128", wide["short backward"]
    yield "taylor forward K8 V64", small["forward"]
    yield "taylor forward K32 V64", large["forward"]
    for width in head.FORWARD if wants_all else (64, 128):
        for name, call in head_call(16, 16_384, 8_192, width).items():
            yield f"head {name} D{width}", call
    for width in (64, 128):
        for name, call in entry_call(16, 65_536, 8_192, width).items():
            yield f"{name} D{width}", call
    yield from window_cases(wants_all)
    for taps in (3, 4):
        for name, call in conv_call(8, 4_096, 1_024, taps).items():
            yield f"short_conv {name} J{taps}", call
    if wants_all:
        for taps in range(conv.TAPS[0], conv.TAPS[1] + 1):
            for name, call in conv_call(4_096, 64, 130, taps, members=16, tail=True).items():
                yield f"short_conv {name} J{taps}, tail", call
        masked = taylor_call(16, 4_096, 16, 16, 64, masked=True)
        wide = taylor_call(16, 4_096, 16, 24, 128)
        sizes = {"parts": parts, "state": state, "masked": masked}
        for size, calls in {**sizes, "K8": small, "K32": large, "K24 V128": wide}.items():
            yield from ((f"taylor {name}, {size}", call) for name, call in calls.items())


def planted() -> tuple[str, Callable[[], object]]:
    """A state of twice as many values as a program has registers for."""
    shapes.FORWARD[3] = shapes.Blocks(64, 128, 4, 2)
    return "planted", taylor_call(16, 32_768, 16, 16, 128)["forward"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--planted", action="store_true")
    given = parser.parse_args()
    driver.set_active(NoDevice())
    found: dict[str, Any] = {"triton": triton.__version__, "programs": {}}
    seen: set[str] = set()
    for name, call in [planted()] if given.planted else cases(given.all):
        for program, kernel in compiled(call):
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                label = f"{name}: {program}" + " again" * (
                    f"{name}: {program}" in found["programs"]
                )
                found["programs"][label] = report(kernel)
                print(label, found["programs"][label], flush=True)
    given.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
