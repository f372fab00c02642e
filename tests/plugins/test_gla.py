"""Gated linear attention: the contract, a textbook sum for every gate, and published sizes."""

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


class TestGatedLinear(MixerContract):
    mixer = "gla"


class TestGatedLinearScalar(MixerContract):
    mixer = "gla"
    fields: ClassVar = {"gate": "scalar"}


class TestGatedLinearFixed(MixerContract):
    mixer = "gla"
    fields: ClassVar = {"gate": "fixed", "heads": 4}


class TestGatedLinearUngated(MixerContract):
    mixer = "gla"
    fields: ClassVar = {"gate": "none"}


class TestGatedLinearUnconvolved(MixerContract):
    mixer = "gla"
    fields: ClassVar = {"conv": 0}


class TestGatedLinearWideValues(MixerContract):
    mixer = "gla"
    fields: ClassVar = {"expand_v": 2, "heads": 1, "gate_rank": 3}
    width = 20


class TestGatedLinearWideKeysParallel(MixerContract):
    mixer = "gla"
    fields: ClassVar = {"key_ratio": 1.0, "gate_temperature": 2}
    backends: ClassVar = {"gated_linear": "parallel"}


class TestGatedLinearReference(MixerContract):
    mixer = "gla"
    fields: ClassVar = {"conv": 4}
    backends: ClassVar = REFERENCES


WIDTH, HEADS, TAPS = 16, 2, 3
GATES = ("channel", "scalar", "fixed", "none")
EXACT = {"atol": 1e-9, "rtol": 1e-9}
"""fp64 has 16 digits; a norm of a small sum of large terms loses several."""


def built(gate: str, conv: int, backend: str) -> Mixer:
    """With parameters off their start, so that no bias is 0 and no norm's weight 1."""
    fields: dict[str, Value] = {"gate": gate, "conv": conv, "gate_rank": 5, "gate_temperature": 4}
    torch.manual_seed(0)
    module = load_mixer("gla")(make_config("gla", WIDTH, {"heads": HEADS, **fields})).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    module.backends = {"gated_linear": backend, "short_conv": "reference"}
    return module


def decay(module: Mixer, gate: str, x_BTD: Tensor) -> Tensor:
    """What is kept, (B, T, H, K)."""
    p, K = module.get_parameter, WIDTH // 2 // HEADS
    shape = (*x_BTD.shape[:2], HEADS, K)
    if gate == "channel":
        logit = x_BTD @ (p("decay_up.weight") @ p("decay_down.weight")).T + p("decay_up.bias")
        return logit.sigmoid().pow(1 / 4).view(shape)
    if gate == "scalar":
        logit = x_BTD @ p("decay.weight").T + p("decay.bias")
        return logit.sigmoid().pow(1 / 4)[..., None].expand(shape)
    kept = [31 / 32, 63 / 64] if gate == "fixed" else [1.0, 1.0]
    return torch.tensor(kept, dtype=torch.float64)[:, None].expand(shape)


def textbook(module: Mixer, gate: str, conv: int, x_BTD: Tensor) -> Tensor:
    """A token reads every one before it; between them lies the product of all decays."""
    p = module.get_parameter
    qkv_BTC = x_BTD @ p("qkv.weight").T
    if conv:
        taps_C1J = p("conv_weight")[:, None]
        padded_BCT = F.pad(qkv_BTC.mT, (conv - 1, 0))
        qkv_BTC = F.silu(F.conv1d(padded_BCT, taps_C1J, groups=2 * WIDTH).mT)
    q, k, v = (
        part.unflatten(-1, (HEADS, -1))
        for part in qkv_BTC.split((WIDTH // 2, WIDTH // 2, WIDTH), -1)
    )
    kept_BTHK = decay(module, gate, x_BTD)
    outputs = []
    for t in range(x_BTD.shape[1]):
        y_BHV = torch.zeros_like(v[:, 0])
        for j in range(t + 1):
            between_BHK = kept_BTHK[:, j + 1 : t + 1].prod(1)
            y_BHV = y_BHV + (q[:, t] * between_BHK * k[:, j]).sum(-1, keepdim=True) * v[:, j]
        length_BH1 = (y_BHV.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        outputs.append(y_BHV / length_BH1 * (WIDTH // HEADS) ** 0.5 * p("norm_weight"))
    y_BTC = torch.stack(outputs, 1).flatten(-2) * F.silu(x_BTD @ p("gate.weight").T)
    return y_BTC @ p("out.weight").T


@pytest.mark.parametrize("conv", [0, TAPS])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", ["reference", "parallel", "chunked"])
def test_mixer_is_the_textbook_sum(backend: str, gate: str, conv: int) -> None:
    """Output and every gradient."""
    module = built(gate, conv, backend)
    x_BTD = torch.randn(2, 19, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x_BTD, *module.parameters()]
    found = []
    for y_BTD in (module(x_BTD), textbook(module, gate, conv, x_BTD)):
        weight_BTD = torch.arange(y_BTD.numel(), dtype=torch.float64).sin().view(y_BTD.shape)
        found.append([y_BTD, *torch.autograd.grad((weight_BTD * y_BTD).sum(), leaves)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_keys_start_as_the_queries_of_one_token_before() -> None:
    torch.manual_seed(0)
    module = load_mixer("gla")(make_config("gla", 64, {"conv": 4}))
    query_CJ, key_CJ, value_CJ = module.get_parameter("conv_weight").split((32, 32, 64))
    query_KD, key_KD, _ = module.get_parameter("qkv.weight").split((32, 32, 64))
    assert torch.equal(query_KD, key_KD)
    for taps_CJ, newest in ((query_CJ, 3), (key_CJ, 2), (value_CJ, 3)):
        off_CJ = taps_CJ - torch.eye(4)[newest]
        assert off_CJ.abs().max() <= 0.1 + 1e-6


@pytest.mark.parametrize(
    ("width", "published", "kept"),
    [(64, 4_864, 4_096), (128, 17_920, 16_384), (256, 68_608, 65_536)],
)
def test_counted_state_is_the_published_one(width: int, published: int, kept: int) -> None:
    """Two heads behind a convolution of 3 D numbers, 4 bytes each."""
    config = make_config("gla", width, {"heads": 2, "conv": 0})
    elements = config.zoology_state_elements(1024)
    assert elements == kept // 4
    assert 4 * (elements + 3 * width) == published
    assert state_bytes(config, 1024, torch.bfloat16) == kept


def test_counted_state_holds_the_taps() -> None:
    """32 x 32 numbers, and 4 x (32 + 32 + 64) of the convolution, of which 3 tokens are kept."""
    config = make_config("gla", 64, {"heads": 2, "conv": 4})
    assert config.zoology_state_elements(1024) == 1024 + 4 * 128
    assert state_bytes(config, 1024, torch.float32) == 4 * (1024 + 3 * 128)


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"gate": "all"}, "gate is 'all'; it must be one of: channel, scalar, fixed, none"),
    ({"expand_v": 0}, "expand_v is 0; it must be at least 1"),
    ({"gate_rank": 0}, "gate_rank is 0; it must be at least 1"),
    ({"gate_temperature": 0}, "gate_temperature is 0; it must be at least 1"),
    ({"conv": 1}, "conv is 1; it must be 0 or at least 2"),
    ({"key_ratio": 0.3}, "key_ratio is 0.3; times the width 32 it gives 9.6 keys"),
    ({"heads": 3}, "heads is 3; it must divide the 16 keys and 32 values"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("gla", 32, fields)
