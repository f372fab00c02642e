"""Families are found by folder, name their backends, load them late and resolve from a table."""

import subprocess
import sys
from pathlib import Path

import archsearch_kernels
import pytest
import torch
from archsearch_kernels import Sizes, families, family, resolve

PACKAGE = Path(archsearch_kernels.__file__).parent


def test_families_are_the_folders_of_the_package() -> None:
    folders = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert [one.name for one in families()] == folders
    assert {"attention", "head_loss"} <= set(folders)


@pytest.mark.parametrize("one", families(), ids=lambda one: one.name)
def test_every_named_backend_loads(one: object) -> None:
    for backend in one.backends:  # type: ignore[attr-defined]
        assert callable(one.load(backend))  # type: ignore[attr-defined]


def test_unknown_backend_lists_those_that_exist() -> None:
    call = family("attention").make_inputs(
        Sizes(batch=1, tokens=2, heads=1, head_size=4, state=False)
    )
    expected = "kernel 'attention' has no backend 'cuda'; it has: reference, sdpa"
    with pytest.raises(LookupError, match=expected):
        family("attention").op(**call.tensors, **call.options, backend="cuda")


def test_unknown_family_lists_those_that_exist() -> None:
    with pytest.raises(LookupError, match="no kernel family 'atention'; there are: attention, "):
        family("atention")


def test_auto_is_a_table_and_never_leaves_what_is_allowed() -> None:
    assert resolve("gated_delta", "cpu", torch.float32) == "chunked"
    assert resolve("gated_delta", "cpu", torch.float64) == "reference"
    assert resolve("gated_delta", "cpu", torch.float32, ("reference",)) == "reference"
    assert resolve("sliding_window", "cpu", torch.bfloat16) == "blocked"
    assert resolve("sliding_window", "cuda", torch.bfloat16) == "triton"
    assert resolve("sliding_window", "cuda", torch.float32) == "masked"
    assert resolve("attention", "mps", torch.float32) == "reference"


def test_what_is_not_allowed_gives_what_the_family_names_instead() -> None:
    name, half = "linear_attention", torch.bfloat16
    every = family(name).backends
    assert resolve(name, "cuda", half) == resolve(name, "cuda", half, every) == "triton"
    assert resolve(name, "cuda", half, set(every) - {"triton"}) == "chunked"
    assert resolve(name, "cuda", half, ("reference", "quadratic")) == "reference"
    assert resolve(name, "cuda", torch.float32) == resolve(name, "cpu", half) == "chunked"


def test_backends_for_one_kind_of_device_are_left_out_elsewhere() -> None:
    assert family("head_loss").backends_on("cpu") == ("reference", "blocked")
    assert family("head_loss").backends_on("cuda") == ("reference", "blocked", "triton")
    assert family("attention").backends_on("cpu") == tuple(family("attention").backends)


def test_references_import_no_backend_and_no_service() -> None:
    program = """
import sys
from archsearch_kernels import Sizes, families
for one in families():
    call = one.make_inputs(Sizes(batch=1, tokens=3, heads=1, head_size=4, state=True))
    one.op(**call.tensors, **call.options, backend="reference")
backends = {target.partition(":")[0] for one in families() for target in one.backends.values()}
print(sorted(m for m in backends if m in sys.modules and not m.endswith(".reference")))
print(sorted({m.partition(".")[0] for m in sys.modules} & {"archsearch", "triton", "ray"}))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.split("\n")[:2] == ["[]", "[]"], out.stderr
