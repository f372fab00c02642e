"""Mamba-2: the contract, the mixer of `transformers` with the same weights, and published sizes."""

from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from torch import Tensor
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer, state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestMamba2(MixerContract):
    mixer = "mamba2"


class TestMamba2Unexpanded(MixerContract):
    mixer = "mamba2"
    fields: ClassVar = {"expand": 1, "state_dim": 8}
    width = 20


class TestMamba2TwoTaps(MixerContract):
    mixer = "mamba2"
    fields: ClassVar = {"conv": 2}


class TestMamba2SmallHeadsParallel(MixerContract):
    mixer = "mamba2"
    fields: ClassVar = {"head_dim": 8, "state_dim": 5}
    backends: ClassVar = {"gated_linear": "parallel"}


class TestMamba2Reference(MixerContract):
    mixer = "mamba2"
    fields: ClassVar = {"head_dim": 16}
    backends: ClassVar = REFERENCES


WIDTH, STATES, TAPS, HEAD = 32, 8, 4, 16
CHANNELS = 2 * WIDTH
NAMES = {
    "in_proj.weight": "inner.weight",
    "out_proj.weight": "out.weight",
    "conv1d.weight": "conv_weight",
    "conv1d.bias": "conv_bias",
    "norm.weight": "norm_weight",
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "D": "D",
}
"""Parameters of the peer -> ours."""


def peer_of() -> Mamba2Mixer:
    """One group of B and C; chunks shorter than the sequence, so that it joins some."""
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=WIDTH,
        state_size=STATES,
        conv_kernel=TAPS,
        expand=2,
        head_dim=HEAD,
        num_heads=CHANNELS // HEAD,
        n_groups=1,
        chunk_size=8,
        num_hidden_layers=1,
        layer_norm_epsilon=1e-6 / CHANNELS,  # theirs is added to a mean, ours to a sum
    )
    peer = Mamba2Mixer(config, 0).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return peer


def with_the_weights_of(peer: Mamba2Mixer) -> Mixer:
    fields: dict[str, Value] = {"state_dim": STATES, "head_dim": HEAD, "conv": TAPS}
    ours = load_mixer("mamba2")(make_config("mamba2", WIDTH, fields))
    found = {NAMES[name]: p.detach() for name, p in peer.named_parameters()}
    found["conv_weight"] = found["conv_weight"].squeeze(1)
    ours.load_state_dict(found)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["reference", "parallel", "chunked"])
def test_mixer_is_that_of_transformers(backend: str, dtype: torch.dtype) -> None:
    """Outputs and every gradient. Their scan and norm run in fp32 whatever the weights are, so that
    no dtype is closer than that."""
    peer = peer_of()
    ours = with_the_weights_of(peer).to(dtype)
    peer.to(dtype)
    ours.backends = {"gated_linear": backend, "short_conv": "reference"}
    x_BTD = torch.randn(2, 37, WIDTH, dtype=dtype)
    mine_BTD, theirs_BTD = (x_BTD.clone().requires_grad_() for _ in range(2))
    y, theirs = ours(mine_BTD), peer(theirs_BTD)
    # Sums of some hundred terms of size 1, each off by 6e-8, and a norm of them.
    torch.testing.assert_close(y, theirs, atol=2e-5, rtol=2e-5)
    weight_BTD = torch.randn_like(y)  # squares would hardly change with the norm's input
    (weight_BTD * y).sum().backward()
    (weight_BTD * theirs).sum().backward()
    pairs: list[tuple[str, Tensor | None, Tensor | None]] = [("x", mine_BTD.grad, theirs_BTD.grad)]
    for name, parameter in peer.named_parameters():
        pairs.append((name, ours.get_parameter(NAMES[name]).grad, parameter.grad))
    for name, found, expected in pairs:
        assert found is not None and expected is not None, name
        error = (found.view_as(expected) - expected).norm() / expected.norm()
        assert error < 2e-5, name


def test_start_is_the_published_one_where_it_says_so() -> None:
    torch.manual_seed(0)
    fields: dict[str, Value] = {"head_dim": 1}
    module = load_mixer("mamba2")(make_config("mamba2", 256, fields))
    steps_H = torch.nn.functional.softplus(module.get_parameter("dt_bias").detach())
    assert steps_H.min() >= 0.99e-3 and steps_H.max() <= 1.01e-1
    # Log-uniform: the mean of the logarithm is in the middle, to 3 errors of 512 draws.
    assert abs(steps_H.log().mean() - torch.tensor(1e-2).log()) < 3 * 1.33 / 512**0.5
    rates_H = module.get_parameter("A_log").detach().exp()
    assert rates_H.min() >= 0.99 and rates_H.max() <= 16.01
    assert abs(rates_H.mean() - 8.5) < 3 * 15 / 12**0.5 / 512**0.5
    assert (module.get_parameter("D") == 1).all()


def test_what_is_written_starts_under_the_token_before() -> None:
    """B_t is C_{t-1}: the same weights, and taps one token late."""
    torch.manual_seed(0)
    module = load_mixer("mamba2")(make_config("mamba2", 16, {"state_dim": 8, "conv": 3}))
    _, _, write_KD, read_KD, _ = module.get_parameter("inner.weight").split((32, 32, 8, 8, 1))
    assert torch.equal(write_KD, read_KD)
    x_CJ, write_CJ, read_CJ = module.get_parameter("conv_weight").split((32, 8, 8))
    for taps_CJ, newest in ((x_CJ, 2), (write_CJ, 1), (read_CJ, 2)):
        off_CJ = taps_CJ - torch.eye(3)[newest]
        assert off_CJ.abs().max() <= 0.1 + 1e-6


@pytest.mark.parametrize(
    ("width", "expand", "head_dim", "heads"),
    [(64, 2, 0, 2), (32, 1, 0, 1), (48, 2, 0, 2), (65, 2, 0, 5), (64, 2, 32, 4)],
)
def test_heads_are_as_large_as_fits(width: int, expand: int, head_dim: int, heads: int) -> None:
    """Of 130 channels, 65 are too many for a head, and the next divisor is 26."""
    config = make_config("mamba2", width, {"expand": expand, "head_dim": head_dim})
    assert config.heads == heads  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "states", "counted"), [(64, 8, 8192), (64, 16, 16_384), (128, 16, 32_768)]
)
def test_published_state_of_two_layers(width: int, states: int, counted: int) -> None:
    """The published figure leaves out the convolution's tail, 3 inputs of 2 D + 2 N channels."""
    config = make_config("mamba2", width, {"state_dim": states})
    assert 2 * 4 * (config.zoology_state_elements(1024) or 0) == counted
    tail = 2 * 3 * (2 * width + 2 * states)
    assert 2 * state_bytes(config, 1024, torch.float32) == counted + 4 * tail
    assert 2 * state_bytes(config, 1024, torch.bfloat16) == counted + 2 * tail


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"state_dim": 0}, "state_dim is 0; it must be at least 1"),
    ({"expand": 0}, "expand is 0; it must be at least 1"),
    ({"conv": 1}, "conv is 1; it must be at least 2"),
    ({"head_dim": 7}, "head_dim is 7; it must divide the 64 channels, or be 0"),
    ({"head_dim": -1}, "head_dim is -1; it must divide the 64 channels, or be 0"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("mamba2", 32, fields)
