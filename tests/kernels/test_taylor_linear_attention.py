"""Taylor linear attention: its programs in the interpreter, and its reference, against the truth.

The interpreter runs the very source that is compiled for a GPU, in fp32: it cannot multiply bf16
matrices. What only a compiler can get wrong is tested on a device (tests/gpu/test_taylor.py).
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from archsearch_kernels import taylor_linear_attention as taylor
from archsearch_kernels.linear_attention import linear_attention
from archsearch_kernels.linear_attention.taylor import features, full_features, similarity
from archsearch_kernels.taylor_linear_attention.layout import layout, tables
from torch import Tensor

INTERPRETER = Path(__file__).with_name("taylor_interpreter.py")
SINGLE = 2e-6
"""Relative error of fp32: sums of up to a hundred terms in another order, 6e-8 each."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call. `programs` that fill a card and the fewest chunks of a part decide the parts."""

    batch: int = 1
    tokens: int = 37
    heads: int = 1
    key_size: int = 16
    value_size: int = 16
    state: bool = False
    masked: bool = False
    keeps: bool = True
    strided: bool = False
    lengths: tuple[int, ...] | None = None
    cuts: tuple[int, int] = (1, 8)
    pairs: int = 0
    queries: int | None = None
    planted: tuple[str, float] | None = None
    run: str = field(default="attention")

    def tensors(self) -> Named:
        generator = torch.Generator().manual_seed(self.tokens)
        B, T, H, K, V = self.batch, self.tokens, self.heads, self.key_size, self.value_size

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        if self.strided:  # heads and queries and keys of one projection, values transposed
            q, k = normal(B, H, T, 2 * K).transpose(1, 2).split(K, -1)
            found = {"q_BTHK": q, "k_BTHK": k, "v_BTHV": normal(B, V, T, H).permute(0, 2, 3, 1)}
        else:
            sizes = {"q_BTHK": K, "k_BTHK": K, "v_BTHV": V}
            found = {name: normal(B, T, H, size) for name, size in sizes.items()}
        if self.state:
            past = features(normal(B, 5, H, K))
            found["memory_BHFV"] = torch.einsum("bphf,bphv->bhfv", past, normal(B, 5, H, V))
            found["normaliser_BHF"] = past.sum(1)
        if self.run == "prefix":
            del found["q_BTHK"]
        if self.queries is not None:
            found["q_BTHK"] = normal(B, self.queries, H, K)
        return found

    def weights(self) -> Named:
        B, T, H, K, V = self.batch, self.tokens, self.heads, self.key_size, self.value_size
        generator, F = torch.Generator().manual_seed(1), layout(K).features
        shapes = {
            "y": (B, self.queries or T, H, V),
            "memory": (B, H, F, V),
            "normaliser": (B, H, F),
        }
        return {n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()}

    def options(self) -> dict[str, Any]:
        exists = torch.rand(self.batch, self.tokens, generator=torch.Generator().manual_seed(2))
        found: dict[str, Any] = {"exists_BT": exists > 0.3 if self.masked else None}
        if self.run == "prefix":
            found["length_B"] = None if self.lengths is None else torch.tensor(self.lengths)
        else:
            found["keep_state"] = self.keeps
        if self.queries is not None:
            places = torch.Generator().manual_seed(3)
            size = (self.batch, self.queries)
            found["at_BS"] = torch.randint(0, self.tokens, size, generator=places)
        return found

    def call(self) -> dict[str, Any]:
        given = {"run": self.run, "tensors": self.tensors(), "weights": self.weights()}
        given |= {"options": self.options(), "cuts": (*self.cuts, self.pairs)}
        if self.planted is not None and self.pairs:
            given |= {"run": "planted_short", "value": self.planted[1]}
        elif self.planted is not None:
            given |= {"run": "planted", "name": self.planted[0], "value": self.planted[1]}
        return given


MANY = (1000, 1)
"""Every chunk is a part of its own."""
RIGHT = (
    *(Case(tokens=tokens) for tokens in (1, 2, 15, 16, 17, 33)),
    *(Case(key_size=K, value_size=19, tokens=20) for K in (4, 5, 8, 12, 20, 24, 32)),
    Case(value_size=1, tokens=17),
    Case(value_size=80, tokens=17, state=True),
    Case(batch=2, heads=3, value_size=20, state=True, masked=True),
    Case(batch=2, heads=2, keeps=False, masked=True),
    Case(strided=True, heads=2, batch=2, state=True),
    Case(strided=True, heads=2, cuts=MANY),
    Case(tokens=70, cuts=MANY),
    Case(tokens=50, cuts=MANY, state=True, masked=True, value_size=20),
    Case(tokens=70, cuts=(2, 2), state=True, keeps=False),  # parts of three chunks, the last short
    Case(tokens=64, cuts=(2, 1), key_size=8),
    Case(tokens=32, batch=2, heads=2, value_size=32, state=True, masked=True),  # descriptors
    *(Case(tokens=tokens, keeps=False, pairs=512) for tokens in (1, 16, 17, 37)),
    *(Case(key_size=K, tokens=20, value_size=24, keeps=False, pairs=512) for K in (4, 12, 32)),
    Case(batch=2, heads=3, tokens=35, value_size=19, masked=True, keeps=False, pairs=512),
    Case(batch=2, heads=2, strided=True, keeps=False, pairs=512),
    Case(batch=2, heads=2, tokens=40, queries=5, masked=True, keeps=False, pairs=512),
    Case(batch=2, tokens=35, queries=19, value_size=40, keeps=False, pairs=512),
    Case(run="prefix"),
    Case(run="prefix", batch=3, heads=2, masked=True, lengths=(0, 16, 29), value_size=20),
    Case(run="prefix", batch=2, lengths=(37, 33), cuts=MANY, key_size=8),
    Case(run="prefix", tokens=40, cuts=(3, 1), strided=True, heads=2),
)
WRONG = (
    Case(planted=("of_query", 1.01)),
    Case(planted=("factor", 1.01), state=True),
    Case(planted=("of_key", 1.01)),
    Case(planted=("ROOT", 1.01), keeps=False, pairs=512),
)


def guarded(case: Case) -> dict[str, Any]:
    """The tensors in the middle of a buffer of NaN, so that a read outside of them is seen."""
    call = case.call()
    for name, x in call["tensors"].items():
        buffer = torch.full((x.shape[0], x.shape[1] + 40, x.shape[2], x.shape[3] + 7), torch.nan)
        inside = buffer[:, 20 : 20 + x.shape[1], :, 3 : 3 + x.shape[3]]
        inside.copy_(x)
        call["tensors"][name] = inside
    return call


def calls() -> dict[Any, dict[str, Any]]:
    """Everything that one process of the interpreter runs, by the name of its result."""
    plain, members = Case(tokens=20, heads=2, batch=2), Case(tokens=18, batch=6)
    zero_keys = Case(tokens=20).call()
    zero_keys["tensors"]["k_BTHK"].zero_()
    empty_rows = Case(tokens=20, batch=2, state=True).call()
    empty_rows["options"]["exists_BT"] = torch.arange(20)[None] >= torch.tensor([[5], [20]])
    for name in ("memory_BHFV", "normaliser_BHF"):
        empty_rows["tensors"][name].zero_()
    state = Case(tokens=7, batch=2, heads=2, key_size=5, state=True).tensors()
    exists = (torch.arange(18) % 5 > 0).expand(2, 18)
    stacked = {name: x.unflatten(0, (3, 2)) for name, x in members.tensors().items()}
    step_state = {name: x[:, 0] if "T" in name else x for name, x in state.items()}
    found = {case: case.call() for case in (*RIGHT, *WRONG)}
    x = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(3))
    mixers = {
        "linear_attention": {"feature_dim": 4, "heads": 2, "head_mix": True},
        "prefix_linear": {"feature_dim": 8, "prefix_len": 5},
    }
    for name, fields in mixers.items():
        found[name] = {"run": "mixer", "name": name, "fields": fields, "x": x}
    return found | {
        "again": RIGHT[-6].call(),
        "undescribed": {**RIGHT[-5].call(), "run": "undescribed"},
        "guarded": guarded(plain),
        "zero keys": zero_keys,
        "empty rows": empty_rows,
        "steps": {"run": "steps", "tensors": Case(tokens=19, heads=2, value_size=20).tensors()},
        "opcheck": {"run": "opcheck", "tensors": state},
        "mapped": {
            "run": "mapped",
            "tensors": stacked,
            "exists": exists,
        },
        "mapped step": {
            "run": "mapped_step",
            "tensors": {
                name: torch.stack([x, x.roll(1, -1), 2 * x], 1 if "F" in name else 0)
                for name, x in step_state.items()
            },
        },
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Named]:
    """What the interpreter returned."""
    given, results = (tmp_path_factory.mktemp("taylor") / name for name in ("calls", "results"))
    asked = calls()
    torch.save(list(asked.values()), given)
    subprocess.run(
        [sys.executable, str(INTERPRETER), str(given), str(results)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    return dict(zip(asked, torch.load(results), strict=True))


def expected(call: dict[str, Any]) -> Named:
    """The reference in fp64 on the same inputs."""
    leaves = {name: x.double().requires_grad_() for name, x in call["tensors"].items()}
    if call["run"] == "prefix":
        state = taylor.prefix_state(**leaves, **call["options"], backend="reference")
        outputs = dict(zip(("memory", "normaliser"), state, strict=True))
    else:
        given = taylor.taylor_linear_attention(**leaves, **call["options"], backend="reference")
        outputs = dict(zip(("y", "memory", "normaliser"), given, strict=True))
    outputs = {name: x for name, x in outputs.items() if x is not None}
    weights = [call["weights"][name].double() for name in outputs]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), weights)
    return {name: x.detach() for name, x in outputs.items()} | {
        f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)
    }


def errors(result: Named, truth: Named) -> dict[str, float]:
    """Relative error of each tensor, or the absolute one where the truth is below size 1."""
    assert result.keys() == truth.keys()
    return {
        name: float((result[name] - exact).square().mean().sqrt())
        / max(1.0, float(exact.square().mean().sqrt()))
        for name, exact in truth.items()
    }


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_programs_agree_with_the_reference(case: Case, found: dict[Any, Named]) -> None:
    for name, error in errors(found[case], expected(case.call())).items():
        assert error < SINGLE, name


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_an_error_of_one_percent_is_seen(case: Case, found: dict[Any, Named]) -> None:
    assert max(errors(found[case], expected(case.call())).values()) > 100 * SINGLE


def test_a_call_repeats_bit_by_bit(found: dict[Any, Named]) -> None:
    for name, x in found[RIGHT[-6]].items():
        assert torch.equal(found["again"][name], x), name


def test_descriptors_and_pointers_read_the_same(found: dict[Any, Named]) -> None:
    for name, x in found[RIGHT[-5]].items():
        assert torch.equal(found["undescribed"][name], x), name


@pytest.mark.parametrize("name", ["guarded", "zero keys", "empty rows"])
def test_nothing_is_read_that_is_not_there(name: str, found: dict[Any, Named]) -> None:
    """Numbers outside of a view are NaN; keys of 0; rows of which nothing has been read."""
    truth = expected(calls()[name])
    for part, error in errors(found[name], truth).items():
        assert error < SINGLE * max(1.0, float(truth[part].abs().max())), part


def test_the_mean_of_values_is_read_through_keys_of_zero(found: dict[Any, Named]) -> None:
    v = calls()["zero keys"]["tensors"]["v_BTHV"]
    mean = v.cumsum(1) / torch.arange(1, 21)[:, None, None]
    torch.testing.assert_close(found["zero keys"]["y"], mean, atol=2e-6, rtol=2e-6)


def test_steps_give_what_one_pass_gives(found: dict[Any, Named]) -> None:
    tensors = Case(tokens=19, heads=2, value_size=20).tensors()
    y, memory, normaliser = taylor.taylor_linear_attention(
        **{name: x.double() for name, x in tensors.items()}, backend="reference"
    )
    truth = {"y": y, "memory": memory, "normaliser": normaliser}
    assert max(errors(found["steps"], truth).values()) < SINGLE


def test_a_population_is_folded_into_the_batch(found: dict[Any, Named]) -> None:
    for i in range(5):
        torch.testing.assert_close(
            found["mapped"][f"together {i}"], found["mapped"][f"apart {i}"], rtol=0, atol=0
        )
    for name in ("y", "memory"):
        assert torch.equal(found["mapped step"][f"{name} together"], found["mapped step"][name])


@pytest.mark.parametrize("mixer", ["linear_attention", "prefix_linear"])
def test_mixers_compute_the_same_with_these_kernels(mixer: str, found: dict[Any, Named]) -> None:
    result = found[mixer]
    assert len(result) > 10
    for i in range(len(result) // 2):
        torch.testing.assert_close(
            result[f"triton {i}"], result[f"chunked {i}"], rtol=1e-4, atol=1e-4
        )  # a sum of squares of size 10


def test_padding_leaves_no_trace() -> None:
    """Left and right, the reference: what exists gives the outputs and the state it gives alone."""
    tensors = Case(tokens=9, batch=2, heads=2).tensors()
    alone = taylor.taylor_linear_attention(**tensors, backend="reference")
    for left, right in ((4, 0), (0, 3), (2, 5)):
        wide = {
            name: torch.cat((x[:, :left] + 7, x, x[:, :right] - 7), 1)
            for name, x in tensors.items()
        }
        exists = torch.zeros(2, left + 9 + right, dtype=torch.bool)
        exists[:, left : left + 9] = True
        y, *state = taylor.taylor_linear_attention(**wide, exists_BT=exists, backend="reference")
        for mine, theirs in zip((y[:, left : left + 9], *state), alone, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_reference_is_the_family_of_linear_attention() -> None:
    few = Case(heads=2, value_size=5, keeps=False, queries=6)
    leaves, places = {n: x.double() for n, x in few.tensors().items()}, few.options()["at_BS"]
    mine = taylor.taylor_linear_attention(
        **leaves, at_BS=places, keep_state=False, backend="reference"
    )
    theirs = linear_attention(
        **leaves, feature_map="taylor", at_BT=places, keep_state=False, backend="quadratic"
    )
    torch.testing.assert_close(mine[0], theirs[0], atol=1e-10, rtol=1e-10)
    tensors = {n: x.double() for n, x in Case(state=True, heads=2, value_size=5).tensors().items()}
    mine = taylor.taylor_linear_attention(**tensors, backend="reference")
    theirs = linear_attention(**tensors, feature_map="taylor", backend="quadratic")
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("key_size", [*range(4, 33)])
def test_tiles_hold_every_feature_once(key_size: int) -> None:
    """In fp64: packed features, full ones, and 1 + t + t^2/2 agree."""
    sizes, table = layout(key_size), tables(key_size, torch.float64, torch.device("cpu"))
    q, k = torch.randn(2, 7, key_size, dtype=torch.float64)
    truth = similarity((q * k).sum(-1) * key_size**-0.5)
    for of in (features, full_features):
        torch.testing.assert_close((of(q) * of(k)).sum(-1), truth, rtol=1e-12, atol=1e-12)
    places = table.places[table.places >= 0]
    assert places.sort().values.tolist() == list(range(sizes.features))
    a, b = table.pairs.long()
    circle = torch.cat((k, torch.ones(7, 1)), -1)  # -1 is the last: the constant 1
    packed = table.weight * circle[:, a] * circle[:, b]
    torch.testing.assert_close(packed, features(k), rtol=1e-6, atol=1e-6)  # weights are fp32


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((16, 16, 3), "keys of 4 to 32"), ((16, 200, 16), "values of up to 128, not 16 and 200")],
)
def test_sizes_without_programs_are_refused(sizes: tuple[int, int, int], said: str) -> None:
    _, value_size, key_size = sizes
    q, v = torch.zeros(1, 2, 1, key_size), torch.zeros(1, 2, 1, value_size)
    with pytest.raises(ValueError, match=said):
        taylor.taylor_linear_attention(q, q, v, backend="triton")


@pytest.mark.parametrize(("tokens", "keeps"), [(513, False), (20, True)])
def test_places_of_their_own_are_refused_where_features_are_read(tokens: int, keeps: bool) -> None:
    q, k, at = torch.zeros(1, 2, 1, 8), torch.zeros(1, tokens, 1, 8), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="over up to 512 keys, with no state"):
        taylor.taylor_linear_attention(q, k, k, at_BS=at, keep_state=keeps, backend="triton")


def test_doubles_and_scattered_states_are_refused() -> None:
    q, state = torch.zeros(1, 2, 1, 4).double(), torch.zeros(1, 1, 15, 4)
    with pytest.raises(ValueError, match="float64"):
        taylor.taylor_linear_attention(q, q, q, backend="triton")
    token = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="dense fp32 state"):
        taylor.step(token, token, token, state.mT.clone().mT, state[..., 0], backend="triton")
