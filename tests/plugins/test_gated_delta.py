"""Gated DeltaNet: the contract, fla's and transformers' plain code, and published state sizes."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from archsearch_kernels import Sizes, family
from peers import fla_reference
from torch import Tensor
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract


class TestGatedDeltaUngated(MixerContract):
    mixer = "gated_delta"
    fields: ClassVar = {"gate": False}


K = 6
ROUNDED = {"atol": 2e-5, "rtol": 2e-5}
"""The peers compute in fp32: sums of up to 65 terms of size 1, each off by 6e-8, and gradients of
them through as many steps."""


def results(op: Callable[..., tuple[Tensor, Tensor]], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Outputs and the gradient of every input."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    outputs = list(op(**leaves))
    weights = [torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), weights)]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    "peer", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"]
)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("tokens", [1, 33, 65])
def test_kernel_is_that_of_fla(tokens: int, backend: str, peer: str, state: bool) -> None:
    """Theirs divide queries by the root of their size unless told otherwise; a memory is K x V."""
    sizes = Sizes(batch=2, tokens=tokens, heads=2, head_size=K, state=state)
    call = family("gated_delta").make_inputs(sizes).cast(torch.float32, "cpu")
    theirs = getattr(fla_reference("gated_delta_rule"), peer)

    def wanted(
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        log_decay_BTH: Tensor,
        beta_BTH: Tensor,
        state_BHVK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        y, memory = theirs(
            q=q_BTHK,
            k=k_BTHK,
            v=v_BTHV,
            beta=beta_BTH,
            g=log_decay_BTH,
            scale=1.0,
            initial_state=None if state_BHVK is None else state_BHVK.mT,
            output_final_state=True,
        )
        return y, memory.mT

    def ours(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        y, memory = family("gated_delta").op(**tensors, backend=backend)
        return y, memory

    tensors = dict(call.tensors)
    # The chunked peer takes differences of sums of logarithms in fp32. These reach -1000 here, so
    # that its decays are off by up to 1e-4.
    close = {"atol": 3e-4, "rtol": 3e-4} if "chunk" in peer else ROUNDED
    for mine, expected in zip(results(ours, tensors), results(wanted, tensors), strict=True):
        torch.testing.assert_close(mine, expected, **close)


WIDTH, HEADS, VALUE = 32, 2, 16


def split_weights(peer: Qwen3NextGatedDeltaNet) -> dict[str, Tensor]:
    """Their weights under our names; theirs are sorted by head, then by what they make."""
    weights = {name: p.detach() for name, p in peer.named_parameters()}
    by_head = weights["in_proj_qkvz.weight"].view(HEADS, 2 * 8 + 2 * VALUE, WIDTH)
    q, k, v, z = (part.flatten(0, 1) for part in by_head.split((8, 8, VALUE, VALUE), dim=1))
    beta, decay = weights["in_proj_ba.weight"].view(HEADS, 2, WIDTH).unbind(1)
    return {
        "qkv.weight": torch.cat((q, k, v)),
        "rates.weight": torch.cat((decay, beta)),
        "gate.weight": z,
        "out.weight": weights["out_proj.weight"],
        "norm_weight": weights["norm.weight"],
        "A_log": weights["A_log"],
        "dt_bias": weights["dt_bias"],
        "conv_weight": weights["conv1d.weight"].squeeze(1),
    }


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_mixer_is_that_of_transformers(backend: str) -> None:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=8,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-12,
    )
    peer = Qwen3NextGatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            elif name != "A_log":
                parameter += 0.2 * torch.randn_like(parameter)
        # Large values: ours adds 1e-6 to a sum of squares where theirs adds to a mean.
        peer.conv1d.weight[2 * HEADS * 8 :] *= 1000
    fields: dict[str, Value] = {"heads": HEADS, "head_dim": 8, "expand_v": VALUE // 8}
    ours = load_mixer("gated_delta")(make_config("gated_delta", WIDTH, fields))
    ours.load_state_dict(split_weights(peer))
    ours.backends = {"gated_delta": backend, "short_conv": "reference"}
    x_BTD = torch.randn(2, 37, WIDTH)
    # Sums of 37 terms in fp32; where they cancel, the norm makes them and their roundings large.
    torch.testing.assert_close(ours(x_BTD), peer(x_BTD), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("width", "published"), [(64, 17_152), (128, 67_072), (256, 265_216)])
def test_counted_state_is_the_published_one(width: int, published: int) -> None:
    """Two heads behind a convolution of 3 D numbers, 4 bytes each."""
    config = make_config("gated_delta", width, {"heads": 2, "head_dim": width // 2})
    assert 4 * ((config.zoology_state_elements(1024) or 0) + 3 * width) == published
