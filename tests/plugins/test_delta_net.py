"""DeltaNet: the contract, fla's plain code, Gated DeltaNet without decay, published state sizes."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from archsearch_kernels import Sizes, families, family
from peers import fla_reference
from torch import Tensor

from archsearch.mixer import state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestDeltaNet(MixerContract):
    mixer = "delta_net"


class TestDeltaNetGated(MixerContract):
    mixer = "delta_net"
    fields: ClassVar = {"heads": 1, "head_dim": 12, "expand_v": 2, "conv": 0, "gate": True}
    width = 20


class TestDeltaNetReference(MixerContract):
    mixer = "delta_net"
    fields: ClassVar = {"head_dim": 8, "conv": 2}
    backends: ClassVar = REFERENCES


ROUNDED = {"atol": 2e-5, "rtol": 2e-5}
"""The peers compute in fp32: sums of up to 64 terms of size 1, each off by 6e-8, and gradients of
them through as many steps."""


def results(op: Callable[..., tuple[Tensor, Tensor]], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Outputs and the gradient of every input."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    outputs = list(op(**leaves))
    weights = [torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), weights)]


@pytest.mark.parametrize(
    ("peer", "tokens"),
    [
        ("delta_rule_recurrence", 1),
        ("delta_rule_recurrence", 33),
        ("delta_rule_chunkwise", 64),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_kernel_without_decay_is_that_of_fla(backend: str, peer: str, tokens: int) -> None:
    """Theirs have heads before tokens, divide queries by the root of their size, and keep K x V."""
    size = 6
    sizes = Sizes(batch=2, tokens=tokens, heads=2, head_size=size, state=False)
    tensors = dict(family("gated_delta").make_inputs(sizes).cast(torch.float32, "cpu").tensors)
    no_decay = torch.zeros_like(tensors.pop("log_decay_BTH"))
    theirs = getattr(fla_reference("delta_rule"), peer)

    def wanted(
        q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK * size**0.5, k_BTHK, v_BTHV))
        y, memory = theirs(q, k, v, beta_BTH.transpose(1, 2))
        return y.transpose(1, 2), memory.mT

    def ours(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        y, memory = family("gated_delta").op(**tensors, log_decay_BTH=no_decay, backend=backend)
        return y, memory

    for mine, expected in zip(results(ours, tensors), results(wanted, tensors), strict=True):
        torch.testing.assert_close(mine, expected, **ROUNDED)


def test_it_is_gated_delta_without_decay() -> None:
    torch.manual_seed(0)
    fields: dict[str, Value] = {"heads": 2, "head_dim": 8, "expand_v": 2, "gate": True}
    ours = load_mixer("delta_net")(make_config("delta_net", 32, fields)).double()
    other = load_mixer("gated_delta")(make_config("gated_delta", 32, fields)).double()
    weights = ours.state_dict()
    weights["rates.weight"] = torch.cat((torch.randn(2, 32), weights["rates.weight"]))
    weights["A_log"] = torch.full((2,), -100.0)  # rates of e^-100
    weights["dt_bias"] = torch.zeros(2)
    other.load_state_dict(weights)
    x_BTD = torch.randn(2, 40, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(x_BTD), other(x_BTD), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("width", "published"), [(64, 8_960), (128, 34_304), (256, 134_144)])
def test_counted_state_is_the_published_one(width: int, published: int) -> None:
    """Two heads behind a convolution of 3 D numbers, 4 bytes each; kept are 9 D more."""
    config = make_config("delta_net", width, {"heads": 2, "head_dim": width // 2})
    elements = config.zoology_state_elements(1024) or 0
    assert 4 * (elements + 3 * width) == published
    assert state_bytes(config, 1024, torch.float32) == 4 * (elements + 3 * 3 * width)
