"""Sliding-window attention: its Triton programs in the interpreter, against the definition in fp64.

The interpreter runs the very source that is compiled for a GPU. It cannot multiply bf16 matrices,
so fp16 stands for what is half-precision. What only a compiler can get wrong is tested on a device
(tests/gpu/test_window.py).
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from archsearch_kernels.sliding_window import sliding_window
from archsearch_kernels.sliding_window import triton as ops
from torch import Tensor

INTERPRETER = Path(__file__).with_name("window_interpreter.py")
SINGLE = 2e-6
"""Relative error of fp32: sums of up to a hundred terms in another order, 6e-8 each."""
HALF = 7e-4
"""Relative error of fp16: four roundings of 2.1e-4 root mean square at most."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call: `older` keys before the first query; blocks of queries and keys."""

    batch: int = 1
    tokens: int = 37
    window: int = 20
    heads: int = 1
    groups: int = 1
    key_size: int = 16
    value_size: int = 16
    older: int = 0
    masked: bool = False
    strided: bool = False
    blocks: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    planted: str = ""

    def tensors(self) -> Named:
        """In the middle of buffers of NaN, so that a read outside of them is seen."""
        generator = torch.Generator().manual_seed(self.tokens)
        B, T, H, G, K, V = (
            *(self.batch, self.tokens, self.heads, self.groups),
            *(self.key_size, self.value_size),
        )
        S = T + self.older

        def normal(*shape: int) -> Tensor:
            buffer = torch.full((shape[0], shape[1] + 80, shape[2], shape[3] + 7), torch.nan)
            if self.strided:  # heads before tokens
                buffer = buffer.transpose(1, 2).contiguous().transpose(1, 2)
            inside = buffer[:, 40 : 40 + shape[1], :, 3 : 3 + shape[3]]
            inside.copy_(torch.randn(shape, generator=generator))
            return inside if self.dtype is torch.float32 else inside.to(self.dtype)

        return {
            "q": normal(B, T, H, K),
            "k": normal(B, S, G, K),
            "v": normal(B, S, G, V),
            "dy": normal(B, T, H, V),
        }

    def exists(self) -> Tensor | None:
        """Empty room at the left, as a ring that fills, and holes; every query sees one key."""
        if not self.masked:
            return None
        S = self.tokens + self.older
        generator = torch.Generator().manual_seed(1)
        exists = torch.rand(self.batch, S, generator=generator) > 0.3
        exists &= torch.arange(S) >= (torch.arange(self.batch) * 7 % (self.older + 1))[:, None]
        exists[:, self.older :: 3] = True
        return exists

    def call(self) -> dict[str, Any]:
        found: dict[str, Any] = {"run": "attention", "tensors": self.tensors()}
        found |= {"window": self.window, "exists": self.exists(), "blocks": self.blocks}
        return found | ({"run": "planted", "module": self.planted} if self.planted else {})


RIGHT = (
    *(Case(tokens=tokens, window=5) for tokens in (1, 2, 15, 16, 17, 33)),
    *(Case(tokens=50, window=window) for window in (1, 2, 16, 17, 31, 32, 33, 50, 4_096)),
    *(Case(tokens=20, key_size=K, value_size=V) for K, V in ((3, 5), (20, 24), (33, 16))),
    Case(batch=2, heads=4, groups=2, masked=True),
    Case(batch=2, heads=3, groups=1, tokens=70, window=33, value_size=24),
    Case(batch=3, tokens=3, older=20, masked=True),
    Case(batch=3, tokens=40, older=20, window=33, masked=True, heads=2),
    Case(tokens=40, older=90, window=33),  # keys that no query sees
    Case(batch=2, tokens=70, window=64, masked=True),  # keys that lack in blocks without a border
    Case(batch=2, heads=2, groups=2, strided=True),
    Case(batch=2, heads=4, groups=2, strided=True, masked=True, older=9, tokens=70, window=48),
    *(Case(tokens=70, window=50, blocks=blocks) for blocks in ((32, 16), (16, 32), (64, 64))),
    *(Case(tokens=tokens, window=30, dtype=torch.float16) for tokens in (1, 16, 70, 130)),
    Case(tokens=200, window=130, dtype=torch.float16, heads=2),
)
WRONG = (Case(planted="forward"), Case(planted="backward"))


def calls() -> dict[Any, dict[str, Any]]:
    """Everything that one process of the interpreter runs, by the name of its result."""
    found = {case: case.call() for case in (*RIGHT, *WRONG)}
    small = Case(batch=2, tokens=7, heads=2)
    exists = torch.arange(7) > torch.tensor([[-1], [2]])
    found["opcheck"] = {"run": "opcheck", "tensors": small.tensors(), "exists": exists}
    members = {n: x.unflatten(0, (3, 2)) for n, x in Case(batch=6, tokens=20).tensors().items()}
    seen = (torch.arange(20) % 5 > 0) | (torch.arange(20) < 1)
    found["mapped"] = {"run": "mapped", "tensors": members, "exists": seen.expand(2, -1)}
    found["mapped"]["window"] = 6
    nothing = small.call() | {"exists": torch.zeros(2, 7, dtype=torch.bool)}
    return found | {"nothing": nothing}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Named]:
    given, results = (tmp_path_factory.mktemp("window") / name for name in ("calls", "results"))
    named = calls()
    torch.save(list(named.values()), given)
    subprocess.run(
        [sys.executable, "-W", "error", str(INTERPRETER), str(given), str(results)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    return dict(zip(named, torch.load(results), strict=True))


def errors(found: Named, case: Case) -> dict[str, float]:
    """Errors relative to the truth, or to 0.1 where that is smaller: a gradient that cancels."""
    tensors = case.tensors()
    leaves = [tensors[name].detach().double().requires_grad_() for name in ("q", "k", "v")]
    y = sliding_window(*leaves, window=case.window, exists_BS=case.exists(), backend="reference")
    truth = (y.detach(), *torch.autograd.grad(y, leaves, tensors["dy"].double()))
    return {
        name: float((found[name].double() - exact).square().mean().sqrt())
        / max(0.1, float(exact.square().mean().sqrt()))
        for name, exact in zip(("y", "dq", "dk", "dv"), truth, strict=True)
    }


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_programs_agree_with_the_reference(case: Case, interpreted: dict[Any, Named]) -> None:
    found = interpreted[case]
    assert {x.dtype for x in found.values()} == {case.dtype}
    for name, error in errors(found, case).items():
        assert error < (SINGLE if case.dtype is torch.float32 else HALF), name


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.planted)
def test_an_error_of_one_percent_is_seen(case: Case, interpreted: dict[Any, Named]) -> None:
    found = errors(interpreted[case], case)
    if case.planted == "backward":
        assert found.pop("y") < SINGLE
    assert min(found.values()) > HALF > SINGLE


def test_a_mapped_call_is_that_of_each_member(interpreted: dict[Any, Named]) -> None:
    found = interpreted["mapped"]
    for i in range(4):
        assert torch.equal(found[f"together {i}"], found[f"apart {i}"])


def test_a_query_that_sees_nothing_is_zero_and_has_no_gradient(
    interpreted: dict[Any, Named],
) -> None:
    assert not any(x.any() for x in interpreted["nothing"].values())


def test_ops_pass_the_check_of_torch(interpreted: dict[Any, Named]) -> None:
    assert interpreted["opcheck"] == {}


def test_what_has_no_programs_is_refused() -> None:
    wide, double = torch.zeros(1, 2, 1, 257), torch.zeros(1, 2, 1, 8, dtype=torch.float64)
    for x, expected in ((wide, "heads of up to 256 numbers, not 257"), (double, "no float64")):
        with pytest.raises(ValueError, match=expected):
            ops.sliding_window(x, x, x, window=2, exists_BS=None, at_BT=None)


def test_the_tables_have_blocks_for_every_head() -> None:
    for table in (ops.SHORT, ops.LONG):
        assert list(table) == sorted(table)
        assert max(table) == 256
