"""Retention: the contract, its three published forms, and a textbook sum that has no memory."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from archsearch_kernels import families
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer, state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestRetention(MixerContract):
    mixer = "retention"


class TestRetentionWithoutPositions(MixerContract):
    mixer = "retention"
    fields: ClassVar = {"rope": False}


class TestRetentionNarrowValues(MixerContract):
    mixer = "retention"
    fields: ClassVar = {"expand_v": 1, "heads": 1}
    width = 20


class TestRetentionManyHeadsParallel(MixerContract):
    mixer = "retention"
    fields: ClassVar = {"heads": 4}
    backends: ClassVar = {"gated_linear": "parallel"}


class TestRetentionReference(MixerContract):
    mixer = "retention"
    backends: ClassVar = REFERENCES


WIDTH, HEADS = 16, 2
EXACT = {"atol": 1e-10, "rtol": 1e-10}
"""fp64 has 16 digits; some hundred terms in another order, and a norm of them, lose a few."""
FORMS = {"recurrent": "reference", "parallel": "parallel", "chunkwise": "chunked"}
"""Published form -> backend."""


def built(form: str, fields: dict[str, Value]) -> Mixer:
    torch.manual_seed(0)
    module = load_mixer("retention")(make_config("retention", WIDTH, {"heads": HEADS, **fields}))
    module.backends = {"gated_linear": FORMS[form]}
    return module.double()


def results(module: Mixer, y_BTD: Tensor, x_BTD: Tensor) -> list[Tensor]:
    """The output, and the gradient of the input and of every parameter."""
    weight_BTD = torch.arange(y_BTD.numel(), dtype=torch.float64).sin().view(y_BTD.shape)
    leaves = [x_BTD, *module.parameters()]
    return [y_BTD, *torch.autograd.grad((weight_BTD * y_BTD).sum(), leaves)]


def textbook(module: Mixer, x_BTD: Tensor, rope: bool) -> Tensor:
    """Every token reads each one before it, times g_h to the distance. Rotations are products with
    complex numbers."""
    q, k = (x_BTD @ module.get_parameter("qk.weight").T).unflatten(-1, (2, HEADS, -1)).unbind(2)
    v = (x_BTD @ module.get_parameter("value.weight").T).unflatten(-1, (HEADS, -1))
    age_TT = torch.arange(x_BTD.shape[1])[:, None] - torch.arange(x_BTD.shape[1])
    half = WIDTH // HEADS // 2
    if rope:
        turn = torch.arange(x_BTD.shape[1])[:, None] * 10_000.0 ** -(
            torch.arange(half, dtype=torch.float64) / half
        )
        spin = torch.polar(torch.ones_like(turn), turn)[:, None]
        q, k = (torch.complex(x[..., :half], x[..., half:]) * spin for x in (q, k))
    score_BHTT = torch.einsum("bthk,bjhk->bhtj", q, k.conj()).real
    kept_HTT = torch.stack([(1 - 2.0 ** (-5 - h)) ** age_TT.double() for h in range(HEADS)])
    y_BTHV = torch.einsum("bhtj,bjhv->bthv", score_BHTT * (kept_HTT * (age_TT >= 0)), v)
    length_BTH1 = (y_BTHV.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    normed = y_BTHV / length_BTH1 * y_BTHV.shape[-1] ** 0.5
    gate = F.silu(x_BTD @ module.get_parameter("gate.weight").T)
    y_BTD: Tensor = (normed.flatten(-2) * gate) @ module.get_parameter("out.weight").T
    return y_BTD


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 64, 131])
@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
def test_published_forms_agree(form: str, tokens: int, rope: bool) -> None:
    x_BTD = torch.randn(2, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for one in (form, "recurrent"):
        module = built(one, {"rope": rope})
        found.append(results(module, module(x_BTD), x_BTD))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, **EXACT)


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_mixer_is_the_textbook_sum(form: str, rope: bool) -> None:
    torch.manual_seed(1)
    x_BTD = torch.randn(2, 37, WIDTH, dtype=torch.float64, requires_grad=True)
    module = built(form, {"rope": rope})
    expected = results(module, textbook(module, x_BTD, rope), x_BTD)
    for mine, theirs in zip(results(module, module(x_BTD), x_BTD), expected, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Heads x K x V numbers of 4 bytes, and a position of 8.
        ({"heads": 2, "expand_v": 2, "rope": True}, 4 * 2 * 16 * 32 + 8),
        ({"heads": 4, "expand_v": 1, "rope": False}, 4 * 4 * 8 * 8),
    ],
)
def test_state_is_as_counted_by_hand(fields: dict[str, Value], expected: int) -> None:
    config = make_config("retention", 32, fields)
    assert {state_bytes(config, context, torch.bfloat16) for context in (5, 64)} == {expected}


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"heads": 3}, "heads is 3; it must divide the width 32"),
    ({"heads": 0}, "heads is 0; it must divide the width 32"),
    ({"expand_v": 0}, "expand_v is 0; it must be at least 1"),
    ({"heads": 32}, "rope needs an even head size; width 32 / 32 heads gives 1"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("retention", 32, fields)
