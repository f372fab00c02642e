"""The programs of `residual_norm` and `embed_norm` in the interpreter against their references.

The interpreter runs the very source that is compiled for a GPU. A population of members is mapped
by vmap, as training maps it; parameters lie strided in one buffer, as training's do. What only a
compiler can get wrong is tested on a device (tests/gpu/test_entry.py).
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from archsearch_kernels import family
from torch import Tensor
from torch.func import vmap

INTERPRETER = Path(__file__).with_name("entry_interpreter.py")
SINGLE = 3e-6
"""Relative error of fp32: sums of up to some hundred terms in another order, 6e-8 each."""
HALF = 2e-3
"""Relative error of fp16: results are rounded by up to 2^-11 = 5e-4 once or twice on the way."""


@dataclass(frozen=True)
class Case:
    """One call; `programs` of a backward pass decide how many blocks each takes, `slice` which
    tokens come so often that parts of them are summed apart, `few` which are summed side by side;
    `counts` says how often each comes."""

    family: str = "residual_norm"
    members: int = 3
    rows: int = 37
    width: int = 20
    vocab: int = 9
    centred: bool = True
    share: float = 0.0
    dtype: torch.dtype = torch.float32
    programs: int = 4
    slice: int = 256
    few: int = 32
    counts: tuple[int, ...] = ()
    traced: bool = False
    planted: dict[str, float] = field(default_factory=dict)

    def call(self) -> dict[str, Any]:
        generator, lead = torch.Generator().manual_seed(self.rows), (self.members or 1,)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*lead, *shape, generator=generator)

        def strided(x: Tensor) -> Tensor:
            """As a view of a buffer with other parameters."""
            buffer = torch.cat((x.flatten(1), torch.full((len(x), 5), torch.nan)), 1)
            return buffer.to(self.dtype)[:, :-5].view(x.shape)

        tensors = {"weight_D": strided(1 + normal(self.width) / 4)}
        if self.centred:
            tensors["bias_D"] = strided(normal(self.width))
        options: dict[str, Any] = {}
        if self.family == "residual_norm":
            shape = (self.rows, 2, self.width)
            tensors |= {name: normal(*shape).to(self.dtype) for name in ("r_ND", "y_ND")}
        else:
            shape = (self.rows, self.width)
            tensors["table_VD"] = strided(normal(self.vocab, self.width))
            # Some tokens never come, and one more often than all others.
            tokens = torch.randint(0, self.vocab - 2, (self.rows,), generator=generator)
            options["tokens_N"] = tokens.where(torch.arange(self.rows) % 3 > 0, 1)
            if self.counts:
                each = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
                options["tokens_N"] = each[torch.randperm(self.rows, generator=generator)]
            if self.share:
                options |= {"share": self.share, "key": torch.arange(*lead) + 2**40}
        weights = [normal(*shape).to(self.dtype) for _ in range(2)]
        if not self.members:
            tensors = {name: x[0] for name, x in tensors.items()}
            weights = [x[0] for x in weights]
            options |= {"key": options["key"][0]} if "key" in options else {}
        given = {"family": self.family, "members": self.members, "tensors": tensors}
        given |= {"options": options, "weights": weights, "programs": self.programs}
        return given | {
            **{"slice": self.slice, "few": self.few},
            **{"traced": self.traced, "planted": self.planted},
        }


def often(*counts: int, **given: Any) -> Case:
    """Tokens that come so often; more than 3 places are many, and slices have 4 of them."""
    given = {"slice": 4, "few": 3, "rows": sum(counts), "vocab": len(counts) + 2, **given}
    return Case("embed_norm", counts=counts, **given)


RIGHT = (
    Case(),
    Case(centred=False),
    Case(members=0),
    Case(members=0, centred=False, programs=1000),
    Case(rows=1, width=1),
    Case(rows=8, width=16, programs=1000),
    Case(rows=33, width=130, programs=3),
    Case(traced=True),
    Case(centred=False, traced=True),
    Case(dtype=torch.float16),
    Case("embed_norm"),
    Case("embed_norm", centred=False),
    Case("embed_norm", share=0.3),
    Case("embed_norm", share=0.3, centred=False, members=0),
    Case("embed_norm", members=0, width=33),
    Case("embed_norm", vocab=40, rows=70, width=16, share=0.5),
    Case("embed_norm", rows=1, width=5),
    Case("embed_norm", share=0.3, traced=True),
    Case("embed_norm", dtype=torch.float16, share=0.1),
    often(4, 3, 1, 4, 5, 0, 7, 8, 9, 2),  # at the border of a slice, and beside it
    often(1, 3, 4, 8, 12, 11, 13, share=0.3),
    often(3, 170, 1, 0, 6, share=0.3, width=5),  # 42 slices: several blocks of them
    often(67),
    often(*(n % 7 for n in range(40)), share=0.3),  # several blocks of tokens
    often(2, 40, 9, few=32),
    often(2, 150, 3, slice=20),  # not a whole number of blocks
    often(3, 170, members=0, dtype=torch.float16),
    often(3, 40, 1, traced=True),
)
WRONG = (Case(planted={"EPSILON": 0.05}), Case("embed_norm", planted={"EPSILON": 0.05}))
CHECKS = Case("checks")
NORMS = ("layernorm", "rmsnorm")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[list[Tensor]]:
    """What the interpreter found, in the order of the cases; it runs torch's own checks, too."""
    calls, results = (tmp_path_factory.mktemp("entry") / name for name in ("calls", "results"))
    asked = [case.call() for case in (CHECKS, *RIGHT)]
    asked += [Case("wired").call() | {"norm": norm} for norm in NORMS]
    torch.save(asked + [case.call() for case in WRONG], calls)  # what is planted stays
    subprocess.run(
        [sys.executable, str(INTERPRETER), str(calls), str(results)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    found: list[list[Tensor]] = torch.load(results)
    return found[1:]


def expected(case: Case) -> list[Tensor]:
    """The reference in fp64 on the same inputs."""
    call = case.call()
    leaves = [x.double().requires_grad_() for x in call["tensors"].values()]
    options = dict(call["options"])
    keys = [options.pop("key")] if case.members and "key" in options else []

    def op(*given: Tensor) -> Any:
        own = dict(zip([*call["tensors"], "key"][: len(given)], given, strict=True))
        return family(case.family).op(**own, **options, backend="reference")

    found = (vmap(op) if case.members else op)(*leaves, *keys)
    weights = [x.double() for x in call["weights"]]
    return [*(y.detach() for y in found), *torch.autograd.grad(found, leaves, weights)]


def errors(found: list[Tensor], case: Case) -> list[float]:
    """Relative error of each result, of no less than size 1: a width of 1 has a norm of 0."""
    return [
        float((mine.double() - truth).norm() / max(truth.norm(), truth.numel() ** 0.5))
        for mine, truth in zip(found, expected(case), strict=True)
    ]


@pytest.mark.parametrize("index", range(len(RIGHT)), ids=lambda index: str(RIGHT[index]))
def test_programs_agree_with_the_reference(index: int, interpreted: list[list[Tensor]]) -> None:
    case, found = RIGHT[index], interpreted[index]
    assert {x.dtype for x in found} == {case.dtype}
    assert max(errors(found, case)) < (HALF if case.dtype.itemsize < 4 else SINGLE)


@pytest.mark.parametrize("place", range(len(NORMS)), ids=NORMS)
def test_a_population_calls_them_where_the_references_stand(
    place: int, interpreted: list[list[Tensor]]
) -> None:
    found = interpreted[len(RIGHT) + place]
    mine, theirs = found[: len(found) // 2], found[len(found) // 2 :]
    assert not all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    for one, other in zip(mine, theirs, strict=True):
        # A tenth of it was seen: roundings of two layers, one after the other.
        assert float((one - other).norm()) <= SINGLE * float(other.norm())


@pytest.mark.parametrize("place", [0, 1])
def test_another_epsilon_is_seen(place: int, interpreted: list[list[Tensor]]) -> None:
    found = errors(interpreted[len(RIGHT) + len(NORMS) + place], WRONG[place])
    assert found[1] > HALF


def test_features_are_dropped_and_tokens_come_often() -> None:
    """The cases hold what they are for."""
    case = next(one for one in RIGHT if one.share)
    assert 0.2 < float((expected(case)[0] == 0).double().mean()) < 0.4
    counts = case.call()["options"]["tokens_N"].bincount(minlength=case.vocab)
    assert int(counts.max()) > 10 and int(counts.min()) == 0
