"""RWKV-7: the contract, the paper's equations written out token by token, published state sizes."""

import math
from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from torch import Tensor

from archsearch.registry import load_mixer, make_config
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}


class TestRwkv7(MixerContract):
    mixer = "rwkv7"


class TestRwkv7ManyHeads(MixerContract):
    mixer = "rwkv7"
    fields: ClassVar = {"head_dim": 24, "rank": 5}
    width = 48


class TestRwkv7Reference(MixerContract):
    mixer = "rwkv7"
    backends: ClassVar = REFERENCES


WIDTH, HEAD = 32, 16


def written_out(p: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    """One sequence, one head at a time, with nothing but vectors and whole matrices."""
    rows = []
    last, memories = torch.zeros_like(x_TD[0]), [torch.zeros(HEAD, HEAD).double()] * (WIDTH // HEAD)
    for x in x_TD:
        r, w, k, v, a, g = ((1 - p["shares"][s]) * x + p["shares"][s] * last for s in range(6))
        receptance, key, value = (
            p[f"{name}.weight"] @ z for name, z in (("receptance", r), ("key", k), ("value", v))
        )
        d = p["decay_bias"] + p["decay.up.weight"] @ torch.tanh(p["decay.down.weight"] @ w)
        decay = torch.exp(-math.exp(-0.5) / (1 + torch.exp(-d)))
        rate = 1 / (
            1 + torch.exp(-(p["rate_bias"] + p["rate.up.weight"] @ p["rate.down.weight"] @ a))
        )
        gate = p["gate.up.weight"] @ torch.sigmoid(p["gate.down.weight"] @ g)
        removed, new = key * p["removal"], key * (1 - p["replacement"] + rate * p["replacement"])
        parts = []
        for h, S in enumerate(memories):
            cut = slice(h * HEAD, (h + 1) * HEAD)
            n = removed[cut] / removed[cut].norm()
            G = torch.diag(decay[cut]) - torch.outer(n, rate[cut] * n)
            memories[h] = S @ G + torch.outer(value[cut], new[cut])
            y = memories[h] @ receptance[cut]
            y = (y - y.mean()) / (y.var(unbiased=False) + HEAD * 1e-5).sqrt()
            y = y * p["norm_weight"][cut] + p["norm_bias"][cut]
            own = (receptance[cut] * p["bonus"][cut] * new[cut]).sum()
            parts.append(y + own * value[cut])
        rows.append(p["out.weight"] @ (torch.cat(parts) * gate))
        last = x
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_mixer_is_the_paper_written_out(backend: str) -> None:
    torch.manual_seed(0)
    ours = load_mixer("rwkv7")(make_config("rwkv7", WIDTH, {"head_dim": HEAD})).double()
    ours.backends = {"wkv7": backend}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        ours.key.weight *= 100  # ours adds 1e-6 to a squared length, theirs nothing
        ours.receptance.weight /= 100
    x_BTD = torch.randn(2, 37, WIDTH, dtype=torch.float64)
    weights = {name: p.detach() for name, p in ours.named_parameters()}
    expected = torch.stack([written_out(weights, x_TD) for x_TD in x_BTD])
    # 1e-6 beside squares of lengths of about 10^5, seen through 37 corrections
    torch.testing.assert_close(ours(x_BTD), expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(("width", "published"), [(64, 17_152), (128, 34_304), (256, 68_608)])
def test_counted_state_is_the_published_one(width: int, published: int) -> None:
    """Heads of 64 behind a convolution of 3 D numbers, 4 bytes each."""
    config = make_config("rwkv7", width, {"head_dim": 64})
    assert 4 * ((config.zoology_state_elements(1024) or 0) + 3 * width) == published


def test_head_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="head_dim is 16; it must divide the width 40"):
        load_mixer("rwkv7").Config(d_model=40)
