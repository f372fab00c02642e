"""The language model: streaming, labelled rows, initialisation, dropout, kernel backends."""

import math
from typing import Any

import pytest
import torch
from archsearch_kernels.dropout import drop
from torch import Tensor
from torch.func import vmap

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.errors import InfeasibleError, PluginError
from archsearch.model import LanguageModel, resolve_backends
from archsearch.registry import make_config, mixer_names

WIDTH, VOCAB, BATCH, TOKENS = 32, 40, 3, 21
SWIGLU = ChannelSpec(kind="swiglu", ratio=2.0)


def stack(*mixers: str, channel: ChannelSpec = SWIGLU) -> ArchSpec:
    layers = tuple(LayerSpec(mixer=mixer, fields={}) for mixer in mixers)
    return ArchSpec(width=WIDTH, layers=layers, channel_mixer=channel)


def model_of(arch: ArchSpec) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(arch, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():  # away from zero biases and tiny projections
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


ALL = stack(*mixer_names())
CAUSAL = stack(*(name for name in mixer_names() if not make_config(name, WIDTH, {}).prefix_len))
"""Every mixer that may be given a text in parts of any length from its first token on."""


@torch.no_grad()
def test_segments_and_steps_equal_one_pass() -> None:
    model, tokens_BT = model_of(CAUSAL).double(), tokens()
    whole_BTD = model(tokens_BT)
    state = model.init_state(BATCH, TOKENS, torch.float64, "cpu")
    first_BTD, state = model.mix(tokens_BT[:, :8], state)
    second_BTD, state = model.mix(tokens_BT[:, 8:13], state)
    # Each layer may differ by 1e-10 of its size, and multiplies what the layers below differ by.
    close = {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(
        torch.cat((first_BTD, second_BTD), dim=1), whole_BTD[:, :13], **close
    )
    for place in range(13, TOKENS):
        logits_BV, state = model.step(tokens_BT[:, place], state)
        torch.testing.assert_close(logits_BV, model.logits(whole_BTD[:, place]), **close)


@torch.no_grad()
@pytest.mark.parametrize("channel", [SWIGLU, ChannelSpec()])
def test_rows_asked_for_are_those_of_the_whole_pass(channel: ChannelSpec) -> None:
    model, tokens_BT = model_of(stack("base_conv", "attention", channel=channel)), tokens()
    at_BK = torch.tensor([[0, 20, 3], [7, 7, 1], [19, 2, 10]])
    rows_BKD = model(tokens_BT, at_BK)
    whole_BTD = model(tokens_BT)
    wanted = torch.stack([whole_BTD[b, at_BK[b]] for b in range(BATCH)])
    torch.testing.assert_close(rows_BKD, wanted)


@torch.no_grad()
def test_block_is_pre_norm_with_two_residual_sums() -> None:
    model, tokens_BT = model_of(stack("attention")), tokens()
    (block,) = model.layers
    assert block.channel is not None and block.channel_norm is not None
    r_BTD = model.embedding.weight[tokens_BT]
    r_BTD = r_BTD + block.mixer(block.norm(r_BTD))
    gate, up = (block.channel_norm(r_BTD) @ block.channel.gate_up.weight.T).chunk(2, dim=-1)
    r_BTD = r_BTD + (torch.nn.functional.silu(gate) * up) @ block.channel.down.weight.T
    torch.testing.assert_close(model(tokens_BT), model.norm(r_BTD))


@torch.no_grad()
def test_head_is_the_embedding() -> None:
    model = model_of(stack("attention"))
    hidden = torch.randn(2, WIDTH)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.embedding.weight.T)
    assert not any("head" in name or "position" in name for name in model.state_dict())


def test_initialisation_is_normal_and_residual_projections_are_scaled() -> None:
    torch.manual_seed(0)
    wide = ArchSpec(
        width=128,
        layers=(LayerSpec(mixer="attention", fields={}),) * 4,
        channel_mixer=ChannelSpec(kind="swiglu", ratio=2.0),
    )
    parameters = dict(LanguageModel(wide, 256).named_parameters())
    scaled = 0.02 / math.sqrt(2 * 4)
    wanted = {
        "embedding.weight": 0.02,
        "blocks.1.mixer.qkv.weight": 0.02,
        "blocks.1.mixer.out.weight": scaled,
        "blocks.1.channel.gate_up.weight": 0.02,
        "blocks.1.channel.down.weight": scaled,
    }
    for name, std in wanted.items():
        # 16,384 samples or more: the standard error of a standard deviation is 0.6 %.
        assert float(parameters[name].detach().std()) == pytest.approx(std, rel=0.03), name


def test_dropout_needs_a_key_and_scales_what_it_keeps() -> None:
    torch.manual_seed(0)
    arch = stack("attention")
    plain, dropping = LanguageModel(arch, VOCAB), LanguageModel(arch, VOCAB, embed_dropout=0.3)
    dropping.load_state_dict(plain.state_dict())
    assert torch.equal(plain(tokens()), dropping(tokens()))
    assert not torch.equal(plain(tokens()), dropping(tokens(), None, torch.tensor(1)))


def test_dropout_masks_have_their_share_and_are_independent() -> None:
    ones = torch.ones(64, 64, 32)
    masks = [drop(ones, 0.1, torch.tensor(key)) for key in (0, 1, 2, 2**31)]
    kept = torch.stack([mask > 0 for mask in masks]).double()
    # 131,072 features each: standard errors are 0.0008 of a share and 0.0003 of a product.
    assert torch.allclose(kept.mean((1, 2, 3)), torch.tensor(0.9).double(), atol=0.005)
    for a in range(4):
        for b in range(a):
            assert float(((1 - kept[a]) * (1 - kept[b])).mean()) == pytest.approx(0.01, abs=0.002)
    for axis in ((1, 2), (0, 2), (0, 1)):  # no row, column or feature is special
        assert float((1 - kept[0]).mean(axis).std()) < 0.02
    assert torch.equal(masks[0].unique(), torch.tensor([0.0, 1 / 0.9]))


def test_dropout_depends_on_its_own_key_alone_under_vmap() -> None:
    x, keys = torch.randn(4, 5), torch.tensor([7, 3, 7])
    grouped = vmap(lambda key: drop(x, 0.5, key))(keys)
    for row, key in zip(grouped, keys, strict=True):
        assert torch.equal(row, drop(x, 0.5, key))
    assert not torch.equal(grouped[0], grouped[1])


def test_backends_are_resolved_once_for_the_whole_architecture() -> None:
    backends = resolve_backends(ALL, "cpu", torch.float32)
    model = LanguageModel(ALL, VOCAB)
    model.use_backends(backends)
    for block in model.layers:
        assert block.mixer.backends == {name: backends[name] for name in block.mixer.kernels}
        assert all(backends[name] in block.mixer.kernels[name] for name in block.mixer.kernels)
    assert backends["attention"] == "sdpa"


@pytest.mark.parametrize(
    ("layers", "backend"),
    [
        ([{"feature_dim": 16}], "triton"),
        ([{"feature_dim": 32, "head_mix": True}, {"feature_dim": 4}], "triton"),
        ([{"feature_dim": 36}], "chunked"),
        ([{"feature_dim": 16}, {"feature_map": "elu"}], "chunked"),
        ([{"compact": False}], "chunked"),
        ([{"normalise": False}], "chunked"),
        ([{"fixed_decay": True}], "chunked"),
    ],
)
def test_a_backend_without_programs_for_a_layer_is_not_chosen(
    layers: list[dict[str, Any]], backend: str
) -> None:
    arch = ArchSpec(
        width=64, layers=tuple(LayerSpec(mixer="linear_attention", fields=one) for one in layers)
    )
    assert resolve_backends(arch, "cuda", torch.bfloat16)["linear_attention"] == backend


def test_a_composite_answers_for_its_parts() -> None:
    parts = [LayerSpec(mixer="linear_attention", fields={"feature_dim": k}) for k in (16, 40)]
    for part, backend in zip(parts, ("triton", "chunked"), strict=True):
        both = (LayerSpec(mixer="base_conv", fields={}), part)
        arch = ArchSpec(width=64, layers=(LayerSpec(mixer="parallel", fields={}, parts=both),))
        assert resolve_backends(arch, "cuda", torch.bfloat16)["linear_attention"] == backend


def test_backends_not_named_stay_the_reference() -> None:
    model = LanguageModel(stack("attention", "gated_delta"), VOCAB)
    model.use_backends({"attention": "sdpa"})
    assert model.layers[0].mixer.backends == {"attention": "sdpa"}
    assert set(model.layers[1].mixer.backends.values()) == {"reference"}


@pytest.mark.parametrize(
    ("channel", "said"),
    [
        (ChannelSpec(kind="swigly", ratio=2.0), "no channel mixer 'swigly'; did you mean 'swiglu'"),
        (
            ChannelSpec(kind="attention", ratio=2.0),
            "no channel mixer 'attention'; there are: none",
        ),
        (ChannelSpec(kind="swiglu", ratio=0.001), "leaves no inner feature"),
    ],
)
def test_impossible_channel_mixers_are_refused(channel: ChannelSpec, said: str) -> None:
    with pytest.raises((PluginError, InfeasibleError), match=said):
        LanguageModel(stack("attention", channel=channel), VOCAB)


def test_norm_and_head_are_as_the_architecture_says() -> None:
    plain = stack("attention")
    other = plain.model_copy(update={"norm": "rmsnorm", "tied_head": False})
    model, tokens_BT = model_of(other), tokens()
    assert isinstance(model.layers[0].norm, torch.nn.RMSNorm)
    assert model.logits(model(tokens_BT)).equal(model(tokens_BT) @ model.head.weight.T)
    assert "head.weight" not in dict(model_of(plain).named_parameters())


def test_what_most_architectures_have_is_left_out_of_the_hash() -> None:
    plain = stack("attention")
    assert {"norm", "tied_head"}.isdisjoint(plain.model_dump())
    other = plain.model_copy(update={"norm": "rmsnorm", "tied_head": False})
    assert other.arch_hash != plain.arch_hash
    assert ArchSpec.from_stored(other.model_dump(mode="json")) == other
