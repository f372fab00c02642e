"""The short convolution: its programs in the interpreter against the reference in fp64.

The interpreter runs the very source that is compiled for a GPU. What only a compiler can get wrong
is tested on a device (tests/gpu/test_short_conv.py).
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from archsearch_kernels.short_conv import short_conv
from torch import Tensor

INTERPRETER = Path(__file__).with_name("short_conv_interpreter.py")
SINGLE = 2e-6
"""Relative error of fp32: sums of up to a hundred terms in another order, 6e-8 each."""
HALF = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Relative error of one rounding: half of the epsilon. Sums, SiLU and gate are in fp32."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call. `cuts`: programs that fill a card, and the fewest tokens of a part."""

    batch: int = 2
    tokens: int = 21
    channels: int = 5
    taps: int = 4
    bias: bool = True
    gate: bool = False
    tail: bool = False
    silu: bool = False
    residual: bool = False
    dtype: torch.dtype = torch.float32
    strided: bool = False
    cuts: tuple[int, int] = (1, 8)
    planted: bool = False

    def tensors(self) -> Named:
        generator = torch.Generator().manual_seed(self.tokens)
        B, T, C, J = self.batch, self.tokens, self.channels, self.taps

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        found = {"x_BTC": normal(B, T, C), "weight_CJ": normal(C, J)}
        if self.bias:
            found["bias_C"] = normal(C)
        if self.gate:
            found["gate_BTC"] = normal(B, T, C)
        if self.tail:
            found["tail_BPC"] = normal(B, J - 1, C)
        found = {name: x.to(self.dtype) for name, x in found.items()}
        return {name: guarded(x, self.strided) for name, x in found.items()}

    def weights(self) -> Named:
        generator = torch.Generator().manual_seed(1)
        shapes = {"y": self.tokens, "tail": self.taps - 1}
        return {
            name: torch.randn(self.batch, rows, self.channels, generator=generator).to(self.dtype)
            for name, rows in shapes.items()
        }

    def call(self) -> dict[str, Any]:
        options = {"silu": self.silu, "residual": self.residual}
        given = {"run": "results", "tensors": self.tensors(), "weights": self.weights()}
        return given | {"options": options, "cuts": self.cuts, "planted": self.planted}


def guarded(x: Tensor, strided: bool) -> Tensor:
    """The tensor in the middle of a buffer of NaN, so that a read outside of it is seen.

    With `strided`, channels do not lie side by side either.
    """
    if x.ndim < 3:
        return x
    shape = (x.shape[0], x.shape[1] + 40, x.shape[2] + 7)
    buffer = torch.full(shape, torch.nan, dtype=x.dtype)
    if strided:
        buffer = buffer.mT.contiguous().mT
    inside = buffer[:, 20 : 20 + x.shape[1], 3 : 3 + x.shape[2]]
    inside.copy_(x)
    return inside


ALL = {"gate": True, "tail": True, "silu": True, "residual": True}
MANY = (1000, 8)
"""Parts as short as they may be."""
RIGHT = (
    *(Case(tokens=tokens, **ALL) for tokens in (1, 2, 3, 4, 8)),
    *(Case(taps=taps, gate=True, silu=True) for taps in (2, 3, 5, 8)),
    *(Case(taps=taps, tokens=40, cuts=MANY, **ALL) for taps in (2, 3, 4, 7, 8)),
    Case(),
    Case(bias=False, residual=True),
    Case(silu=True, bias=False, tail=True),
    Case(gate=True, tokens=30, cuts=MANY),
    Case(channels=70, tokens=5, **ALL),
    Case(channels=130, tokens=3, batch=1, **ALL),
    Case(batch=7, tokens=4, cuts=(3, 8), **ALL),  # programs of several rows, the last of one
    Case(strided=True, tokens=30, cuts=MANY, **ALL),
    Case(dtype=torch.float16, **ALL),
    Case(dtype=torch.bfloat16, tokens=30, cuts=MANY, **ALL),
)
WRONG = (Case(planted=True, **ALL), Case(planted=True, silu=True, tokens=30, cuts=MANY))


def members() -> tuple[Named, dict[str, int | None]]:
    """Tensors of three members, mapped in other dimensions than the first; one gate serves all."""
    many = [Case(batch=2, tokens=9, **ALL).tensors() for _ in range(3)]
    in_dims: dict[str, int | None] = {
        "x_BTC": 1, "weight_CJ": 2, "bias_C": 0, "gate_BTC": None, "tail_BPC": 0
    }  # fmt: skip
    stacked = {
        name: many[0][name]
        if dim is None
        else torch.stack([one[name] * (1 + m / 4) for m, one in enumerate(many)], dim)
        for name, dim in in_dims.items()
    }
    return stacked, in_dims


def calls() -> dict[Any, dict[str, Any]]:
    """Everything that one process of the interpreter runs, by the name of its result."""
    tensors, in_dims = members()
    return {
        **{case: case.call() for case in RIGHT + WRONG},
        "opcheck": {"run": "opcheck", "tensors": Case(**ALL).tensors()},
        "mapped": {"run": "mapped", "tensors": tensors, "in_dims": in_dims},
    }


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Named]:
    given, results = (tmp_path_factory.mktemp("short_conv") / name for name in ("calls", "results"))
    torch.save(list(calls().values()), given)
    subprocess.run(
        [sys.executable, str(INTERPRETER), str(given), str(results)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    return dict(zip(calls(), torch.load(results), strict=True))


def expected(case: Case) -> Named:
    """The reference in fp64 on the same inputs."""
    leaves = {name: x.double().requires_grad_() for name, x in case.tensors().items()}
    y, tail = short_conv(**leaves, **case.call()["options"], backend="reference")
    weights = [x.double() for x in case.weights().values()]
    gradients = torch.autograd.grad((y, tail), list(leaves.values()), weights)
    named = {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"y": y.detach(), "tail": tail.detach()} | named


def errors(found: Named, case: Case) -> Named:
    """Relative error of each result."""
    truth = expected(case)
    assert found.keys() == truth.keys()
    return {n: (found[n].double() - exact).norm() / exact.norm() for n, exact in truth.items()}


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_programs_agree_with_the_reference(case: Case, interpreted: dict[Any, Named]) -> None:
    assert {x.dtype for x in interpreted[case].values()} == {case.dtype}
    for name, error in errors(interpreted[case], case).items():
        assert error < HALF.get(case.dtype, SINGLE), name


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_an_error_of_one_percent_is_seen(case: Case, interpreted: dict[Any, Named]) -> None:
    found = errors(interpreted[case], case)
    assert min(error for name, error in found.items() if name != "tail") > SINGLE
    assert found["y"] > max(HALF.values()) or case.residual


def test_ops_pass_the_check_of_torch(interpreted: dict[Any, Named]) -> None:
    assert interpreted["opcheck"] == {}


def test_members_have_taps_of_their_own_in_one_launch(interpreted: dict[Any, Named]) -> None:
    found = interpreted["mapped"]
    assert (found.pop("together launches"), found.pop("apart launches")) == (1, 3)
    for name, x in found.items():
        torch.testing.assert_close(
            x, found[name.replace("together", "apart")], rtol=1e-5, atol=1e-5
        )
    assert found["together 2"].abs().min() > 0  # gradients of the taps of each member
