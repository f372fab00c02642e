"""Chunk routing keeps the contract with every switch, and is its two operators at the extremes."""

import math
from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from archsearch_kernels.attention import attention
from archsearch_kernels.gated_delta import gated_delta
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer, state_bytes
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}
SMALL = {"chunk": 4, "head_dim": 8}
"""Chunks so short that the contract's 33 tokens hold eight."""


class TestChunkRouted(MixerContract):
    mixer = "chunk_routed"


class TestShortChunks(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL


class TestReference(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"split": 2}
    backends: ClassVar = REFERENCES


class TestSharedRoutesRotaryPlain(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {
        "heads": 4,
        "groups": 2,
        "split": 2,
        "rope": True,
        "expand_v": 1,
        "conv": 0,
    }
    width = 20


class TestMamba2(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"linear": "mamba2"}


class TestMamba2Reference(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"linear": "mamba2", "conv": 2}
    backends: ClassVar = REFERENCES


class TestSoftmaxInside(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"inside": "softmax"}


class TestLinearInside(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"inside": "linear"}


class TestNoDecayThroughKeptChunks(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"decay_through": False}


class TestJointNorm(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"norm": "joint"}


class TestWithoutWeights(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"weights": "none"}


class TestSigmoidWeights(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"weights": "sigmoid"}


class TestLinearWeightsFromInput(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"weights": "linear", "weights_from": "input"}


class TestGradientOfBothWays(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"route_gradient": "both"}


class TestCapOfTwoChunks(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"max_kv_chunks": 2, "heads": 4}


class TestCapOfAShareReference(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"kv_share_max": 0.5}
    backends: ClassVar = REFERENCES


class TestPenalty(MixerContract):
    mixer = "chunk_routed"
    fields: ClassVar = SMALL | {"penalty": 1.0, "kv_share_target": 0.25, "kv_share_max": 0.5}


EXACT = 1e-10
"""fp64 has 16 digits; sums in another order lose a few."""


def build(**fields: Value) -> Mixer:
    """A module of width 32 in fp64, with chunks of 4 and routes of both kinds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = load_mixer("chunk_routed")(make_config("chunk_routed", 32, {**SMALL, **fields}))
    module.backends = {"chunk_routed": "chunked", "short_conv": "reference"}
    return module.double()


def sequence(tokens: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(batch, tokens, 32, generator=generator, dtype=torch.float64)


def chunkwise(op: object, tokens: int, *tensors: Tensor) -> Tensor:
    """Apply an op to each chunk of 4 as to a sequence of its own."""
    starts = range(0, tokens, 4)
    return torch.cat([op(*(x[:, t : t + 4] for x in tensors)) for t in starts], 1)  # type: ignore[operator]


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("everything", [True, False], ids=["all kept", "none kept"])
def test_extremes_are_softmax_attention_and_gated_delta(everything: bool) -> None:
    """All kept: attention over everything, memories of one chunk. None kept: the converse."""
    module, x = build(kv_share_max=1.0 if everything else 0.0), sequence(23)
    if everything:
        torch.nn.init.zeros_(module.route.weight)  # a score of zero asks for keys
    on = module._project(x, None)
    memories = [part.unflatten(-1, (2, -1)) for part in (on.q, on.k, on.v)]

    def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend="reference").flatten(2)

    def read(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        y, _ = gated_delta(unit(q), unit(k), v, log_decay, beta, backend="reference")
        return y.flatten(2)

    soft, rates = (on.q_soft, on.k_soft, on.v_soft), module._rates(x)
    if everything:
        z, y = look(*soft), chunkwise(read, 23, *memories, *rates)
    else:
        z, y = chunkwise(look, 23, *soft), read(*memories, *rates)
    expected = module._merge(x, on.q, torch.stack((z, y), 2))
    torch.testing.assert_close(module(x), expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("norm", ["separate", "joint"])
@pytest.mark.parametrize("source", ["query", "input"])
@pytest.mark.parametrize("weights", ["softmax", "sigmoid", "linear", "none"])
def test_outputs_are_merged_as_written(weights: str, source: str, norm: str) -> None:
    """Head by head: the weights of its two outputs, their norms, and the gate."""
    module = build(weights=weights, weights_from=source, norm=norm, split=2)
    with torch.no_grad():
        module.norm_weight.add_(torch.linspace(-0.5, 0.5, 8).double())
    x, q = sequence(3), sequence(3)[..., :16] ** 2
    outputs = torch.stack((sequence(4)[:, :3], sequence(5)[:, :3]), 2)
    heads = []
    for a in range(4):
        z, y = outputs[..., 8 * a : 8 * a + 8].unbind(2)
        shares = [torch.ones(2, 3, 1).double()] * 2
        if weights != "none":
            rows = module.mixing.weight[[a, 4 + a]]
            logits = (q if source == "query" else x) @ rows.T
            if weights == "softmax":
                logits = logits.exp() / logits.exp().sum(-1, keepdim=True)
            elif weights == "sigmoid":
                logits = 1 / (1 + (-logits).exp())
            shares = [logits[..., :1], logits[..., 1:]]
        if norm == "joint":
            added = shares[0] * z + shares[1] * y
            heads.append(unit(added) * 8**0.5 * module.norm_weight[0])
        else:
            parts = zip(shares, (z, y), module.norm_weight, strict=True)
            heads.append(sum(share * unit(o) * 8**0.5 * scale for share, o, scale in parts))
    gate = x @ module.gate.weight.T
    expected = (torch.cat(heads, -1) * gate * gate.sigmoid()) @ module.out.weight.T
    torch.testing.assert_close(module._merge(x, q, outputs), expected, atol=EXACT, rtol=EXACT)


def test_operators_share_one_projection() -> None:
    """After taps and SiLU; RMS-normalised for the softmax heads, each of which is half a head."""
    module, x = build(split=2, rope=True, conv=4), sequence(7)
    with torch.no_grad():
        module.soft_norm_weight.add_(torch.linspace(-0.5, 0.5, 8).double().view(2, 4))
    padded = torch.nn.functional.pad(x @ module.qkv.weight.T, (0, 0, 3, 0))
    taps = sum(module.conv_weight[:, j] * padded[:, j : j + 7] for j in range(4))
    q, k, v = (taps * taps.sigmoid()).split((16, 16, 32), -1)  # type: ignore[union-attr]
    on = module._project(x, None)
    angles = torch.arange(7)[:, None, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    for found, plain, scale in zip(
        (on.q_soft, on.k_soft), (q, k), module.soft_norm_weight, strict=True
    ):
        one, two = (unit(plain.unflatten(-1, (4, 4))) * 2 * scale).split(2, -1)
        turned = (one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos())
        torch.testing.assert_close(found, torch.cat(turned, -1), atol=EXACT, rtol=EXACT)
    for found, plain in zip((on.q, on.k, on.v, on.v_soft.flatten(2)), (q, k, v, v), strict=True):
        torch.testing.assert_close(found, plain, atol=EXACT, rtol=EXACT)


def test_nothing_kept_is_the_mixer_gated_delta() -> None:
    """With the weights of a `gated_delta` and the attention's norm at zero."""
    ours, x = build(kv_share_max=0.0, weights="none"), sequence(33)
    config = make_config("gated_delta", 32, {"heads": 2, "head_dim": 8})
    theirs = load_mixer("gated_delta")(config).double()
    theirs.backends = {"gated_delta": "chunked", "short_conv": "reference"}
    shared = {name: p for name, p in ours.state_dict().items() if name in theirs.state_dict()}
    theirs.load_state_dict(shared | {"norm_weight": torch.full((16,), 0.5).double()})
    with torch.no_grad():
        ours.norm_weight.copy_(torch.tensor([[0.0], [0.5]]).expand(2, 16))
    torch.testing.assert_close(ours(x), theirs(x), atol=EXACT, rtol=EXACT)


def test_a_route_is_felt_after_its_chunk_only() -> None:
    """The last token of chunk 1 turns its route; nothing up to that token changes by a bit."""
    module, x = build(), sequence(24, batch=1)
    with torch.no_grad():
        module.route.weight.zero_()[:, 0] = 1.0
        module.qkv.weight[:, 0] = module.rates.weight[:, 0] = module.gate.weight[:, 0] = 0.0
    x[..., 0] = 0.1
    turned = x.clone()
    turned[:, 7, 0] = -10.0  # a channel that the router alone reads
    kept = [module._routes(inputs, None).kept[0, :, 0].tolist() for inputs in (x, turned)]
    assert kept == [[True] * 6, [True, False, True, True, True, True]]
    before, after = module(x), module(turned)
    assert torch.equal(before[:, :8], after[:, :8])
    assert ((before[:, 8:] - after[:, 8:]).abs().amax(-1) > 1e-6).all()
    state = module.init_state(1, 24, torch.float64, "cpu")
    decoded = []
    for x_BD in turned.unbind(1):
        y_BD, state = module.step(x_BD, state)
        decoded.append(y_BD)
    torch.testing.assert_close(torch.stack(decoded, 1), after, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("gradient", ["selected", "both"])
def test_router_gets_the_gradient_straight_through(gradient: str) -> None:
    """d loss / d w = sum over chunks of (d loss / d r - d loss / d s) p (1 - p) mean x."""
    module, x = build(route_gradient=gradient, groups=1), sequence(18)
    found = torch.autograd.grad(module(x).sin().sum(), module.route.weight)[0]
    routes = module._routes(x, None)
    r, s = (t.detach().requires_grad_() for t in (routes.to_keys, routes.to_memory))
    y, *_ = module._mix(x, module._project(x, None), routes._replace(to_keys=r, to_memory=s), {})
    to_keys, to_memory = torch.autograd.grad(y.sin().sum(), (r, s))
    assert to_keys.abs().max() > 0 < to_memory.abs().max()
    if gradient == "selected":
        to_keys, to_memory = to_keys * routes.kept, to_memory * ~routes.kept
    mean_BND = x[:, :16].unflatten(1, (4, 4)).mean(2)
    chance_BN1 = (mean_BND @ module.route.weight.T).sigmoid()
    at_score = (to_keys - to_memory)[:, :4] * chance_BN1 * (1 - chance_BN1)
    expected = torch.einsum("bng,bnd->gd", at_score, mean_BND)
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_penalty_adds_its_gradient_whatever_the_scale_of_the_loss(scale: float) -> None:
    strong, weak, x = build(penalty=3.0, kv_share_target=0.2), build(penalty=1.0), sequence(22)
    weak.config = make_config("chunk_routed", 32, SMALL | {"penalty": 1.0, "kv_share_target": 0.2})
    torch.testing.assert_close(strong(x), weak(x), atol=0, rtol=0)
    parameters = (strong.route.weight, strong.route.bias)
    found = torch.autograd.grad(scale * strong(x).square().sum(), parameters)
    less = torch.autograd.grad(scale * weak(x).square().sum(), (weak.route.weight, weak.route.bias))
    mean_BND = x[:, :20].unflatten(1, (5, 4)).mean(2)
    score_BNG = mean_BND @ strong.route.weight.T + strong.route.bias
    chance_BNG = score_BNG.sigmoid()
    share_G = (score_BNG >= 0).double().mean((0, 1))
    # d/dw of 2 (share - 0.2)^2, the share's derivative being that of the mean chance
    loss = (2 * 2 * (share_G - 0.2) * chance_BNG.mean((0, 1))).sum()
    expected = torch.autograd.grad(loss, parameters)
    for one, other, wanted in zip(found, less, expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(one - other, wanted, atol=EXACT, rtol=EXACT)


def test_penalty_moves_the_share_to_its_target() -> None:
    module, x = build(penalty=1.0, kv_share_target=0.25), sequence(64, batch=8)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        (0 * module(x).sum()).backward()
        optimiser.step()
    share_G = module.observe(x)["kv_share"]
    assert ((share_G - 0.25).abs() < 0.05).all(), share_G


@pytest.mark.parametrize(
    "fields",
    [{"max_kv_chunks": 2}, {"kv_share_max": 0.5}, {"kv_share_max": 0.4, "max_kv_chunks": 3}, {}],
    ids=str,
)
def test_decoding_keeps_what_one_pass_keeps_within_the_cap(fields: dict[str, Value]) -> None:
    module, x, length = build(**fields, heads=4), sequence(40, batch=4), 40
    share, most = module.config.kv_share_max, module.config.max_kv_chunks or length
    token = state_bytes(module.config, 2, torch.float64) - state_bytes(
        module.config, 1, torch.float64
    )
    fixed = state_bytes(module.config, 1, torch.float64) - token
    state = module.init_state(4, length, torch.float64, "cpu")
    filled = []
    for t, x_BD in enumerate(x.unbind(1), start=1):
        _, state = module.step(x_BD, state)
        kept_BG = state["kept"]
        assert (kept_BG <= min(share * (t // 4) + 1e-9, most)).all()
        filled.append(4.0 * kept_BG.double().mean(1) + t % 4)
    whole = module._routes(x, None).kept
    assert torch.equal(state["kept"], whole.sum(1))
    counted = {"kv_share": whole.double().mean((0, 1))}
    torch.testing.assert_close(module.observe(x), counted, check_dtype=False)
    least, expected, maximum = module.config.state_range(length, torch.float64)
    peak_B = fixed + token * torch.stack(filled).amax(0)
    # The open chunk is counted whole: its last token is settled in the step that brings it.
    assert (least - token <= peak_B).all() and (peak_B <= maximum).all()
    assert least <= expected <= maximum == state_bytes(module.config, length, torch.float64)


def test_state_range_spans_no_chunk_to_all() -> None:
    config = build().config
    token = (16 + 32) * 4  # keys of two heads of 8 and values of two of 16, in fp32
    ranges = config.state_range(40, torch.float32)
    assert ranges.maximum - ranges.minimum == 36 * token
    assert ranges.expected - ranges.minimum == 20 * token  # half of ten chunks
    capped = make_config("chunk_routed", 32, SMALL | {"max_kv_chunks": 3})
    ranges = capped.state_range(40, torch.float32)
    assert ranges.maximum - ranges.minimum == 12 * token == ranges.expected - ranges.minimum
    aimed = {"penalty": 1.0, "kv_share_target": 0.1}
    ranges = make_config("chunk_routed", 32, SMALL | aimed).state_range(40, torch.float32)
    assert ranges.expected - ranges.minimum == 4 * token
    assert config.state_range(3, torch.float32) == (state_bytes(config, 3, torch.float32),) * 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chunk": 0}, "chunk is 0"),
        ({"groups": 4}, "groups is 4; it must be 0 or divide 2"),
        ({"heads": 4, "groups": 3}, "groups is 3"),
        ({"split": 3}, "split is 3; it must divide head_dim"),
        ({"split": 8, "rope": True}, "split is 8"),
        ({"conv": 1}, "conv is 1"),
        (
            {"weights": "tanh"},
            "weights is 'tanh'; it must be one of softmax, sigmoid, linear, none",
        ),
        ({"inside": "softmax", "decay_through": False}, "decay_through must be true"),
        ({"kv_share_max": 1.5}, "kv_share_max is 1.5; it must be 0 to 1$"),
        ({"penalty": math.inf}, "penalty is inf; it must be 0 or more, and finite"),
        ({"max_kv_chunks": -1}, "max_kv_chunks is -1"),
        ({"penalty": 1.0, "kv_share_max": 0.25}, "0.5; it must be 0 to 0.25, the kv_share_max"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_said(fields: dict[str, Value], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        make_config("chunk_routed", 32, SMALL | fields)
