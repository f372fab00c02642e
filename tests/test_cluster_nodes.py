"""Which nodes of a cluster are used, and how a worker's process is made ready."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from archsearch.cluster import greeting, process, worker
from archsearch.cluster.nodes import STRIKES, Node, Nodes
from archsearch.errors import ServiceError
from archsearch.spec import ResourcesSpec


def node(name: str, **has: float) -> Node:
    return Node(name, f"host-{name}", has or {"CPU": 2.0})


def two(**resources: float) -> Nodes:
    return Nodes(ResourcesSpec.model_validate(resources), [node("a"), node("b")])


def test_different_trials_lost_in_a_row_are_strikes_and_a_good_end_forgives() -> None:
    nodes = two()
    said = [nodes.note_lost("a", 7, "crash") for _ in range(STRIKES + 1)]
    assert said == [None] * len(said), "one trial, however often, says nothing about its node"
    assert nodes.note_lost("a", 8, "crash") is None
    nodes.note_well("a")
    said = [nodes.note_lost("a", number, f"crash {number}") for number in range(STRIKES)]
    assert said == [
        None,
        None,
        "host-a (node a) lost 3 trials in a row, the last: crash 2; it is left alone from now on",
    ]
    assert (nodes.usable, nodes.slots) == ({"b"}, 2)
    assert nodes.note_lost("a", 99, "once more") is None, "it is said once"


def test_a_lost_trial_goes_elsewhere_as_long_as_there_is_elsewhere() -> None:
    nodes = two()
    nodes.note_lost("a", 7, "crash")
    assert (nodes.avoided(7), nodes.avoided(8)) == ({"a"}, frozenset())
    nodes.note_lost("b", 7, "crash")
    assert nodes.avoided(7) == frozenset()
    nodes.leave_alone("b", "is sick")
    assert nodes.avoided(7) == nodes.avoided(8) == {"b"}


def test_slots_follow_the_nodes() -> None:
    nodes = two()
    assert nodes.slots == 4
    assert nodes.see([node("b"), node("c")]) == [
        "host-a (node a) has left the cluster; trials at once now: 4",
        "host-c (node c) has joined the cluster; trials at once now: 4",
    ]
    assert nodes.see([]) and nodes.slots == 0 and nodes.all_left_alone == ""
    nodes.see([node("d", CPU=64.0)])
    assert nodes.slots == 64
    limited = two(parallel=3)
    limited.see([node("d", CPU=64.0)])
    assert limited.slots == 3


def test_whole_gpus_and_parts_of_them_fit_as_often_as_ray_gives_them() -> None:
    has = [node("a", CPU=8, GPU=2)]
    slots = [Nodes(ResourcesSpec(gpus=gpus), has).slots for gpus in (2, 1, 1 / 3, 1 / 4)]
    assert slots == [1, 2, 6, 8]


def test_trials_that_are_to_be_alone_have_one_node_each() -> None:
    nodes = Nodes(ResourcesSpec(cpus=2), [node("a", CPU=8), node("b"), node("c", CPU=1)], True)
    assert nodes.slots == 2
    assert [nodes.freest(7, busy).node_id for busy in ({}, {"a"}, {"b"})] == ["a", "b", "a"]
    nodes.note_lost("a", 7, "crash")
    assert (nodes.freest(7, {}).node_id, nodes.freest(8, {}).node_id) == ("b", "a")
    assert nodes.freest(7, {"b"}).node_id == "a", "rather where it was lost than not alone"


def test_the_nearest_fit_of_several_nodes_is_named() -> None:
    have = [node("a", CPU=64), node("b", CPU=8, GPU=1, **{"accelerator_type:L4": 1})]
    for asked, nearest in (
        (ResourcesSpec(gpus=2), "8 CPUs and 1 GPUs"),
        (ResourcesSpec(cpus=128), "64 CPUs and 0 GPUs"),
        (ResourcesSpec(cpus=128, device="L4"), "8 CPUs and 1 GPUs"),
        (ResourcesSpec(cpus=128, device="H200"), "64 CPUs and 0 GPUs"),
    ):
        with pytest.raises(ServiceError, match=f"nearest has {nearest}; device types: L4"):
            Nodes(asked, have)


def test_a_share_of_a_gpu_is_capped_before_the_trial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", done.append)

    def events(*_given: str) -> Iterator[str]:
        yield f"runs after {done}"

    monkeypatch.setattr(worker, "events", events)
    monkeypatch.setattr(process, "_END_S", 0.0)  # nobody kills this process after its last event
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, "given")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    code = greeting.code_versions()
    assert list(greeting.greet(code, "stub", "{}", 1.0))[1:] == ["runs after []"]
    assert list(greeting.greet(code, "stub", "{}", 0.25))[1:] == [f"runs after [{0.25 * 0.95}]"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert list(greeting.greet(code | {"archsearch": "0.0"}, "stub", "{}", 0.0))[1:] == []
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "nothing is done for other code"
    assert len(list(greeting.greet(code, "stub", "{}", 0.0))) == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_caches_of_kernels_belong_to_one_process_and_are_found_again(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from archsearch.cluster.process import prepare\n"
        "prepare(0.0)\n"
        "print(os.environ['TRITON_CACHE_DIR'], os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("TRITON_CACHE_DIR", None)
    environment["TORCHINDUCTOR_CACHE_DIR"] = "given"

    def start() -> tuple["subprocess.Popen[str]", str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline()

    first, second = start(), start()
    first[0].communicate()
    third = start()
    for running, _said in (second, third):
        running.communicate()
    assert first[1] != second[1] and first[1] == third[1]
    home = tmp_path / f"archsearch-kernels-{os.getuid()}"
    assert first[1] == f"{home / 'slot-0' / 'triton'} given\n"
    assert home.stat().st_mode & 0o777 == 0o700


def test_what_travels_to_workers_imports_the_standard_library_alone() -> None:
    for module in (greeting, process):
        assert module.__file__ is not None
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and node.module != process.__name__
                else []
            )
        }
        assert names <= sys.stdlib_module_names


def test_a_greeting_says_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(greeting.code_versions()) >= {"archsearch"}
    assert set(greeting.other_versions()) == {"Python", "torch", "ray"}
    monkeypatch.setitem(sys.modules, "archsearch", None)
    assert greeting.code_versions()["archsearch"] == greeting.MISSING
