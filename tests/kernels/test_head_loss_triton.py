"""The head's Triton programs in the interpreter against the reference: no GPU is needed.

The interpreter runs the very source that is compiled for a GPU, one program after the other. It
cannot multiply bf16 matrices, so fp16 stands for what is half-precision. What only a compiler can
get wrong is tested on a device (tests/gpu/test_head_loss.py).
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from archsearch_kernels.head_loss import head_loss, hits
from torch import Tensor

INTERPRETER = Path(__file__).with_name("interpreter.py")
SINGLE = 2e-6
"""Relative error of fp32: the logits are exact, but times log2 e, up to 30, they are off by 6e-8 of
that, which exp makes relative errors of the probabilities; the rest are sums of a hundred terms."""
HALF = 1e-3
"""Relative error of fp16 gradients: probabilities and results are rounded by up to 2^-11 = 5e-4."""


@dataclass(frozen=True)
class Case:
    """One call. `processors` 1 never splits a pass; many split it into single blocks.

    A traced one goes through the graph that a compiler would get.
    """

    members: int = 2
    rows: int = 37
    vocab: int = 75
    width: int = 20
    dtype: torch.dtype = torch.float32
    weighted: bool = False
    strided: bool = False
    traced: bool = False
    blocks: tuple[int, int] = (16, 16)
    processors: int = 1
    planted: dict[str, float] = field(default_factory=dict)

    def call(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.rows)

        def normal(*shape: int) -> Tensor:
            # In steps of 1/64 logits are exact in any order of their sums, and ties are ties.
            return (torch.randn(*shape, generator=generator) * 64).round() / 64

        hidden = normal(self.members, self.rows, self.width)
        head = normal(self.members, self.vocab, self.width)
        head[:, -1] = head[:, 0]  # ties
        if self.strided:  # as views of one buffer of all parameters are
            head = torch.cat((head.flatten(1), normal(self.members, 5)), 1)
        head = head.to(self.dtype)
        if self.strided:
            head = head[:, :-5].view(self.members, self.vocab, self.width)
        return {
            "hidden": hidden.to(self.dtype),
            "head": head,
            "labels": torch.randint(0, self.vocab, (self.rows,), generator=generator).where(
                torch.arange(self.rows) % 3 > 0, (hidden @ head.float().mT)[0].argmax(-1)
            ),
            "weights": (1 + normal(self.rows)).relu() if self.weighted else None,
            "d_loss": torch.tensor([1.0, 0.5, 2.0])[: self.members],
            "blocks": self.blocks,
            "processors": self.processors,
            "traced": self.traced,
            "planted": self.planted,
        }


RIGHT = (
    Case(),
    Case(weighted=True),
    Case(processors=1000),  # every block its own part
    Case(processors=1000, weighted=True),
    Case(processors=13),  # some parts of several blocks
    Case(strided=True, processors=1000),
    Case(strided=True, traced=True),
    Case(weighted=True, traced=True, processors=13),
    Case(blocks=(32, 64)),
    Case(blocks=(128, 128)),  # all in one block
    Case(members=3, rows=16, vocab=32, width=16),  # nothing to pad
    Case(members=3, rows=16, vocab=32, width=16, processors=1000),
    Case(members=1, rows=1, vocab=5, width=6),
    Case(members=1, rows=50, vocab=33, width=130),
    Case(dtype=torch.float16),
    Case(dtype=torch.float16, weighted=True, processors=1000),
    Case(dtype=torch.float16, rows=16, vocab=32, width=64),
)
WRONG = (Case(planted={"LOG2E": 1.4426950408889634 * 1.01}),)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """What the interpreter found, by the place of a case in RIGHT + WRONG."""
    calls, results = (tmp_path_factory.mktemp("head") / name for name in ("calls", "results"))
    torch.save([case.call() for case in RIGHT + WRONG], calls)
    subprocess.run(
        [sys.executable, str(INTERPRETER), str(calls), str(results)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    return dict(enumerate(torch.load(results)))


def expected(case: Case) -> dict[str, Tensor]:
    """The reference in fp64 on the same inputs."""
    call = case.call()
    hidden, head = (call[name].double().requires_grad_() for name in ("hidden", "head"))
    labels, weights = call["labels"], call["weights"]
    loss = head_loss(hidden, head, labels_N=labels, weights_N=weights, backend="reference")
    d_hidden, d_head = torch.autograd.grad(loss, (hidden, head), call["d_loss"].to(loss))
    found = hits(hidden.detach(), head.detach(), labels, backend="reference")
    return {"loss": loss.detach(), "hits": found, "d_hidden": d_hidden, "d_head": d_head}


def errors(found: dict[str, Tensor], case: Case) -> dict[str, float]:
    """Relative error of each floating-point result."""
    truth = expected(case)
    return {
        name: float((found[name].double() - exact).norm() / exact.norm())
        for name, exact in truth.items()
        if name != "hits"
    }


@pytest.mark.parametrize("index", range(len(RIGHT)), ids=lambda index: str(RIGHT[index]))
def test_programs_agree_with_the_reference(
    index: int, interpreted: dict[int, dict[str, Tensor]]
) -> None:
    case, found = RIGHT[index], interpreted[index]
    half = case.dtype.itemsize < 4
    assert found["loss"].dtype is torch.float32
    assert found["d_hidden"].dtype is found["d_head"].dtype is case.dtype
    for name, error in errors(found, case).items():
        assert error < (HALF if half and name != "loss" else SINGLE), name
    assert found["hits"].tolist() == expected(case)["hits"].tolist()


def test_cases_hit_and_miss() -> None:
    counts = expected(RIGHT[0])["hits"].tolist()
    assert 12 <= counts[0] < 37  # every third row was given its best token


def test_an_error_of_one_percent_is_seen(interpreted: dict[int, dict[str, Tensor]]) -> None:
    """Exponentials whose base is off by 1 % in their logarithm."""
    found = errors(interpreted[len(RIGHT)], WRONG[0])
    assert min(found.values()) > HALF > SINGLE
