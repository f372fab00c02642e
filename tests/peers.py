"""Implementations not written here, which tests compare ours with."""

import importlib.util
from importlib.metadata import distribution
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding


def fla_reference(op: str) -> ModuleType:
    """Load the plain-PyTorch reference of one op of `fla-core`, such as `gla`.

    By its file: importing the package needs Triton, which an installation for CPUs leaves out.
    """
    path = distribution("fla-core").locate_file(f"fla/ops/{op}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op.replace('/', '_')}", str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Qwen3Peer(NamedTuple):
    """Attention of Qwen3 with its rotation, and its weights under our names."""

    layer: nn.Module
    rotation: nn.Module
    weights: dict[str, Tensor]


def qwen3_attention(width: int, heads: int, groups: int, base: float) -> Qwen3Peer:
    """Attention with normed, rotated queries and keys; random weights, those of norms too."""
    config = Qwen3Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width // heads,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        rms_norm_eps=1e-12,
        attn_implementation="eager",
    )
    generator = torch.Generator().manual_seed(0)
    layer = Qwen3Attention(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    theirs = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    weights = {
        "qkv.weight": torch.cat([theirs[f"{part}_proj.weight"] for part in "qkv"]),
        "out.weight": theirs["o_proj.weight"],
        "q_norm": theirs["q_norm.weight"],
        "k_norm": theirs["k_norm.weight"],
    }
    return Qwen3Peer(layer, Qwen3RotaryEmbedding(config), weights)


def qwen3_output(peer: Qwen3Peer, x_BTD: Tensor, window: int) -> Tensor:
    """What it makes of a sequence whose tokens see themselves and the `window - 1` before."""
    tokens = x_BTD.shape[1]
    age_TT = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden_TT = torch.zeros(tokens, tokens).masked_fill((age_TT < 0) | (age_TT >= window), -1e9)
    angles = peer.rotation(x_BTD, torch.arange(tokens)[None])
    y_BTD: Tensor = peer.layer(x_BTD, angles, hidden_TT[None, None])[0]
    return y_BTD
