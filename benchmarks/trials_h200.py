"""Training at the speed of the card: recipe `zoology-figure2`, measured end to end in one call.

    python benchmarks/trials_h200.py [--out FILE] [--budget SECONDS] [--only NAME] [--tiny]
                                     [--cache FOLDER] [--commit HASH]

Every case is a population in a process of its own: a cold compile cache for the first case, then a
warm one; two epochs with their evaluation, timed; milliseconds of a step of each shape; how busy
the GPU is over an evaluated epoch and what share of it the host needs to launch; peak memory beside
what was counted before; and whether 60 steps repeat bit by bit. One case trains to the end. Cases
that the budget has no time left for are named as left out. The file is written after every case.
`--tiny` runs few examples on any device, to try the script. A `--cache` that is given is not
emptied: no case is cold if `--case NAME --brief` filled it before, with the same variables.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.bench_trials import covered
from archsearch.cost import compute_dtype
from archsearch.feed import epoch_feeds
from archsearch.members import members_of
from archsearch.memory import population_bytes
from archsearch.model import ENTRY, resolve_backends
from archsearch.mqar import generate
from archsearch.population import Population
from archsearch.profile import device_model
from archsearch.recipes import RECIPES
from archsearch.spec import MqarSpec, TrainSpec

REPEATED_STEPS = 60
PUBLISHED_RUNS_PER_HOUR = 9.3
"""Of the published trainer on an H200, d=128, 32 epochs, in whose multiples goals are set."""


@dataclass(frozen=True)
class Case:
    """`plain`: mixers as plain PyTorch (kernel families at torch backends), compiled.

    `torch_norms`, `torch_conv`: embedding and norms, or short convolutions, by torch.
    `cold`: the first to compile; only its epochs are timed. `whole`: all epochs, not two.
    """

    name: str
    width: int = 128
    mixer: str = "linear_attention"
    rates: tuple[float, ...] = (1e-3, 10**-2.5, 1e-2, 10**-1.5)
    seeds: int = 4
    plain: bool = False
    torch_norms: bool = False
    torch_conv: bool = False
    deterministic: bool = False
    cold: bool = False
    whole: bool = False


CASES = (
    Case("taylor, d=128, M=16, cold", cold=True),
    Case("taylor, d=128, M=16"),
    Case("taylor, d=128, M=16, 32 epochs", whole=True),
    Case("taylor, d=64, M=16", width=64),
    Case("taylor, d=128, M=1", rates=(10**-2.5,), seeds=1),
    Case("taylor, d=128, M=16, plain mixers", plain=True),
    Case("attention, d=128, M=16", mixer="attention"),
    Case("base_conv, d=128, M=16", mixer="base_conv"),
    Case("sliding_window, d=128, M=16", mixer="sliding_window"),
    Case("gated_delta, d=128, M=16", mixer="gated_delta"),
    Case("taylor, d=128, M=16, torch's convolution", torch_conv=True),
    Case("taylor, d=128, M=16, torch's norms", torch_norms=True),
    Case("taylor, d=128, M=16, deterministic", deterministic=True),
)
"""In order of what is wanted most."""


class Bench:
    """One case on one device."""

    def __init__(self, case: Case, tiny: bool) -> None:
        self.case = case
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        recipe = RECIPES["zoology-figure2"]
        self.task, self.train = recipe.task, self._train(recipe.train)
        if tiny:
            self.task, self.train = self._less(self.task, self.train)
        fields: dict[str, Any] = {"feature_dim": 16} if case.mixer == "linear_attention" else {}
        layers = (
            LayerSpec(mixer="base_conv", fields={}),
            LayerSpec(mixer=case.mixer, fields=fields),
        )
        self.arch = ArchSpec(width=case.width, layers=layers)
        dtype = compute_dtype(self.train.precision)
        self.backends = resolve_backends(self.arch, self.device, dtype)
        if case.torch_norms:
            self.backends |= dict.fromkeys(ENTRY, "reference")
        if case.plain:
            self.backends["linear_attention"] = "chunked"
        if case.plain or case.torch_conv:
            self.backends["short_conv"] = "reference"

    def _train(self, train: TrainSpec) -> TrainSpec:
        given = {"learning_rates": self.case.rates, "seeds": self.case.seeds}
        return train.model_copy(update={**given, "precision": "bf16", "rungs": train.epochs})

    def _less(self, task: MqarSpec, train: TrainSpec) -> tuple[MqarSpec, TrainSpec]:
        def few(segments: Any) -> Any:
            return tuple(one.model_copy(update={"examples": 8}) for one in segments[:2])

        task = task.model_copy(
            update={"vocab_size": 512, "train": few(task.train), "test": few(task.test)}
        )
        return task, train.model_copy(update={"batch_size": 4, "test_batch_size": 4})

    def population(self) -> Population:
        given = (self.arch, self.task.vocab_size, members_of(self.train), self.train, 0)
        return Population(*given, self.device, self.backends)

    def run(self) -> dict[str, Any]:
        begun = time.perf_counter()
        data, selection = (
            generate(self.task, part, self.device) for part in ("train", "selection")
        )
        data_seconds = time.perf_counter() - begun
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        population = self.population()
        running = population.train(data, selection)
        recall, seconds, losses = [], [], []
        for _ in range(self.train.epochs if self.case.whole else 2):
            begun = time.perf_counter()
            rung = next(running)
            seconds.append(time.perf_counter() - begun)
            recall.append(rung.selection_recall)
            losses.append(rung.train_loss)
        found = {
            "members": [asdict(one) for one in population.members],
            "backends": self.backends,
            "data_seconds": data_seconds,
            "epoch_seconds": seconds,
            "compile_and_capture_seconds": seconds[0] - seconds[1],
            "recall": recall,
            "train_loss": losses,
            "runs_per_hour_end_to_end": self._rate(population, data_seconds, seconds),
        }
        if self.case.cold or self.case.whole:
            return found
        found |= self._profiled(running) | self._memory(population) | self._steps(population)
        return found | {"repeats_bit_by_bit": self._repeats(data)}

    def _rate(self, population: Population, data_seconds: float, seconds: list[float]) -> float:
        """Full runs an hour: data, the first epoch with what it compiles, the others, those not
        timed like the second; each with its evaluation."""
        others = seconds[1:] + seconds[1:2] * (self.train.epochs - len(seconds))
        whole = data_seconds + seconds[0] + sum(others)
        return 3600 * len(population.members) / whole

    def _profiled(self, running: Any) -> dict[str, Any]:
        """One more epoch under the profiler: how much of it the GPU computes."""
        if self.device == "cpu":
            next(running)
            return {"device_busy": None}
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            begun = time.perf_counter()
            next(running)
            lasted_us = 1e6 * (time.perf_counter() - begun)
        spans, by_name = [], {}
        for event in profiled.events() or ():
            if event.device_type == torch.profiler.DeviceType.CUDA:
                spans.append((event.time_range.start, event.time_range.end))
                by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us()
        top = sorted(by_name.items(), key=lambda item: -item[1])[:25]
        return {
            "device_busy": covered(spans) / lasted_us,
            "kernels_ms_of_an_epoch": {name[:120]: us / 1e3 for name, us in top},
        }

    def _memory(self, population: Population) -> dict[str, Any]:
        given = (self.arch, self.task, self.train, torch.device(self.device), self.backends)
        counted = population_bytes(*given, len(population.members), exact=True)
        if self.device == "cpu":
            return {"bytes_counted": counted}
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"bytes_counted": counted, "bytes_allocated": allocated, "bytes_reserved": reserved}

    def _steps(self, population: Population) -> dict[str, Any]:
        """Milliseconds of a step of each shape, and of the host until it is launched."""
        (group,) = population.groups
        by_shape, by_host, epoch_ms = {}, {}, 0.0
        plan = population.plan
        for feed in dict.fromkeys(plan):
            name = f"{feed.examples.name}, {len(feed.index_B)} rows"
            group.advance([feed])  # captured, compiled
            self._wait()
            begun, count = time.perf_counter(), 30 if self.device == "cuda" else 2
            group.advance([feed] * count)
            by_host[name] = 1e3 * (time.perf_counter() - begun) / count
            self._wait()
            by_shape[name] = 1e3 * (time.perf_counter() - begun) / count
            epoch_ms += by_shape[name] * plan.count(feed)
        host_ms = sum(by_host.values()) / len(by_host) * len(plan)
        return {
            "step_ms": by_shape,
            "host_ms": by_host,
            "train_ms_of_an_epoch": epoch_ms,
            "host_share_at_most": host_ms / epoch_ms,
        }

    def _repeats(self, data: Any) -> bool:
        """Whether two trainings of some steps end with the same bits."""
        plan, ends = epoch_feeds(data, self.train.batch_size), []
        for _ in range(2):
            population = self.population()
            population._begin(len(plan))
            population._advance(plan, 0, min(REPEATED_STEPS, len(plan)))
            ends.append(torch.cat([group.flat_MP for group in population.groups]))
        return torch.equal(*ends)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def in_own_process(case: Case, cache: Path, tiny: bool, limit: float) -> dict[str, Any]:
    """Measure a case; a failure is its result."""
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    command = [sys.executable, __file__, "--case", case.name, *(["--tiny"] if tiny else [])]
    begun = time.perf_counter()
    try:
        out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than the {limit:.0f} s that were left"}
    took = {"process_seconds": time.perf_counter() - begun}
    if out.returncode:
        return {"failed": out.stderr[-3000:], **took}
    values: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return values | took


def line(name: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{name:42} failed: {found['failed'].strip().splitlines()[-1][:120]}"
    first, second, *_ = found["epoch_seconds"]
    busy = found.get("device_busy")
    return (
        f"{name:42} {found['runs_per_hour_end_to_end']:8.0f} runs/h   epochs {first:6.2f}, "
        f"{second:5.2f} s   best recall {max(found['recall'][-1]):.4f}   "
        f"busy {'-' if busy is None else f'{busy:.0%}'}   "
        f"repeats {found.get('repeats_bit_by_bit', '-')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("trials_h200.json"))
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for all cases")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--case", help="measure this one here and print its JSON last")
    parser.add_argument("--brief", action="store_true", help="with --case: its epochs alone")
    parser.add_argument("--cache", type=Path, help="folder of compile caches, kept")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.case:
        case = next(one for one in CASES if one.name == given.case)
        if given.tiny:
            case = replace(case, width=16)
        if given.brief:
            case = replace(case, cold=True, whole=False)
        torch.use_deterministic_algorithms(case.deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        print(json.dumps(Bench(case, given.tiny).run()))
        return
    begun, cases = time.perf_counter(), {}
    values = {
        "benchmark": "trials_h200",
        "device": device_model("cuda" if torch.cuda.is_available() else "cpu"),
        "torch": torch.__version__,
        "published_runs_per_hour": PUBLISHED_RUNS_PER_HOUR,
        "commit": given.commit,
        "cases": cases,
    }
    with tempfile.TemporaryDirectory() as empty:
        for case in (one for one in CASES if given.only in one.name):
            left = given.budget - (time.perf_counter() - begun)
            found = (
                in_own_process(case, given.cache or Path(empty), given.tiny, left)
                if left > 20
                else {"failed": "left out: the budget is spent"}
            )
            cases[case.name] = found
            given.out.write_text(json.dumps(values, indent=1) + "\n")
            print(line(case.name, found), flush=True)


if __name__ == "__main__":
    main()
