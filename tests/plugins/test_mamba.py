"""Mamba: the contract, the mixers of `transformers` with the same weights, and published sizes."""

from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from torch import Tensor, nn
from transformers.models.falcon_mamba.configuration_falcon_mamba import FalconMambaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.configuration_jamba import JambaConfig
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.configuration_mamba import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer, state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestMamba(MixerContract):
    mixer = "mamba"


class TestMambaPlainNorm(MixerContract):
    mixer = "mamba"
    fields: ClassVar = {"norm_bcdt": "plain", "expand": 1, "conv": 3, "dt_rank": 5}
    width = 20


class TestMambaWeightedNormReference(MixerContract):
    mixer = "mamba"
    fields: ClassVar = {"norm_bcdt": "weighted", "state_dim": 8}
    backends: ClassVar = REFERENCES


WIDTH, STATES, TAPS = 32, 8, 4
SIZES = {"hidden_size": WIDTH, "state_size": STATES, "conv_kernel": TAPS, "expand": 2}
NAMES = {
    "in_proj.weight": "inner.weight",
    "out_proj.weight": "out.weight",
    "conv1d.weight": "s6.conv_weight",
    "conv1d.bias": "s6.conv_bias",
    "x_proj.weight": "s6.x_proj.weight",
    "dt_proj.weight": "s6.dt_proj.weight",
    "dt_proj.bias": "s6.dt_bias",
    "A_log": "s6.A_log",
    "D": "s6.D",
    "dt_layernorm.weight": "s6.dt_norm",
    "b_layernorm.weight": "s6.B_norm",
    "c_layernorm.weight": "s6.C_norm",
}
"""Parameters of the peers -> ours."""


def peer_of(norm: str) -> nn.Module:
    if norm == "none":
        return MambaMixer(MambaConfig(**SIZES), 0)
    if norm == "plain":
        # Its constructor fills norms that it has not made yet; it can be told to leave that out.
        peer = FalconMambaMixer(FalconMambaConfig(**SIZES), 0, initialize_mixer_weights=False)
        peer.init_falcon_mamba_weights()
        return peer
    config = JambaConfig(
        hidden_size=WIDTH,
        mamba_d_state=STATES,
        mamba_d_conv=TAPS,
        mamba_expand=2,
        mamba_dt_rank=WIDTH // 16,
    )
    return JambaMambaMixer(config, 0)


def with_the_weights_of(peer: nn.Module, norm: str) -> Mixer:
    config = make_config("mamba", WIDTH, {"state_dim": STATES, "norm_bcdt": norm})
    ours = load_mixer("mamba")(config)
    found = {NAMES[name]: p.detach() for name, p in peer.named_parameters()}
    found["s6.conv_weight"] = found["s6.conv_weight"].squeeze(1)
    ours.load_state_dict(found)
    return ours


@pytest.mark.parametrize("backend", ["reference", "associative"])
@pytest.mark.parametrize("norm", ["none", "plain", "weighted"])
def test_mixer_is_that_of_transformers(norm: str, backend: str) -> None:
    """Their slow paths run in fp32 whatever the weights are. Outputs and every gradient."""
    torch.manual_seed(0)
    peer = peer_of(norm).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    ours = with_the_weights_of(peer, norm)
    ours.backends = {"selective_scan": backend, "short_conv": "reference"}
    x_BTD = torch.randn(2, 19, WIDTH)
    y, theirs = ours(x_BTD), peer(x_BTD)
    close = {
        "atol": 1e-4,
        "rtol": 1e-4,
    }  # sums of some 64 terms of size 10 in fp32, and exp of them
    torch.testing.assert_close(y, theirs, **close)
    y.square().sum().backward()
    theirs.square().sum().backward()
    for name, parameter in peer.named_parameters():
        mine, expected = ours.get_parameter(NAMES[name]).grad, parameter.grad
        assert mine is not None and expected is not None
        error = (mine.view_as(expected) - expected).norm() / expected.norm()
        assert error < 1e-4, name


def test_start_is_the_published_one_where_it_says_so() -> None:
    torch.manual_seed(0)
    module = load_mixer("mamba")(make_config("mamba", 256, {"state_dim": 16}))
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    steps = torch.nn.functional.softplus(parameters["s6.dt_bias"].detach())
    assert steps.min() >= 0.99e-3 and steps.max() <= 1.01e-1
    # Log-uniform: the mean of the logarithm is in the middle, to 3 errors of 512 draws.
    assert abs(steps.log().mean() - torch.tensor(1e-2).log()) < 3 * 1.33 / 512**0.5
    rates = torch.arange(1, 17.0).expand(512, 16)
    torch.testing.assert_close(parameters["s6.A_log"].exp(), rates)
    assert (parameters["s6.D"] == 1).all()
    assert parameters["s6.dt_proj.weight"].shape == (512, 16)


@pytest.mark.parametrize(
    ("width", "states", "counted", "kept"),
    [(64, 8, 8192, 11_264), (64, 16, 16_384, 19_456), (128, 16, 32_768, 38_912)],
)
def test_published_state_of_two_layers(width: int, states: int, counted: int, kept: int) -> None:
    """The published figure leaves out the convolution's tail, 3 inputs of 2 D channels."""
    config = make_config("mamba", width, {"state_dim": states})
    assert 2 * 4 * (config.zoology_state_elements(1024) or 0) == counted
    assert 2 * state_bytes(config, 1024, torch.float32) == kept


REFUSED: list[tuple[dict[str, Value], str]] = [
    ({"state_dim": 0}, "state_dim is 0; it must be at least 1"),
    ({"expand": 0}, "expand is 0; it must be at least 1"),
    ({"conv": 1}, "conv is 1; it must be at least 2"),
    ({"dt_rank": -1}, "dt_rank is -1; it must be at least 0"),
    ({"norm_bcdt": "layer"}, "norm_bcdt is 'layer'; it must be one of: none, plain, weighted"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("mamba", 32, fields)
