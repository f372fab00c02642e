"""Prefix linear attention: the contract, the published equation, and prompts padded on the left."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from archsearch_kernels import families
from archsearch_kernels.linear_attention import linear_attention, prefix_state
from archsearch_plugins.prefix_linear import PrefixLinear
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.registry import load_mixer, make_config
from archsearch.space import Value
from archsearch.testing import MixerContract

REFERENCES = {one.name: "reference" for one in families()}
EXACT = 1e-10
"""fp64 has 16 digits; a hundred terms of size 1 in another order lose two or three."""


class TestPrefixLongerThanTheText(MixerContract):
    mixer = "prefix_linear"


class TestPrefixOfTheWholeText(MixerContract):
    mixer = "prefix_linear"
    fields: ClassVar = {"prefix_len": 33}


class TestPrefix(MixerContract):
    mixer = "prefix_linear"
    fields: ClassVar = {"prefix_len": 8}


class TestPrefixFull(MixerContract):
    mixer = "prefix_linear"
    fields: ClassVar = {
        "prefix_len": 1,
        "feature_map": "taylor_full",
        "feature_dim": 4,
        "heads": 4,
    }
    width = 20


class TestPrefixReference(MixerContract):
    mixer = "prefix_linear"
    fields: ClassVar = {"prefix_len": 20, "feature_dim": 8, "heads": 2}
    backends: ClassVar = REFERENCES


def build(width: int = 12, **fields: Value) -> PrefixLinear:
    torch.manual_seed(0)
    module = load_mixer("prefix_linear")(make_config("prefix_linear", width, fields)).double()
    assert isinstance(module, PrefixLinear)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    return module


def textbook(module: PrefixLinear, x_TD: Tensor) -> Tensor:
    """Equation 3 of arXiv:2407.05483 for one sequence: scores alone, no state and no features."""
    config = module.config
    T, K, V = x_TD.shape[0], config.feature_dim, config.head_size
    q_weight, k_weight = module.qk.weight.chunk(2)
    heads = []
    for h in range(config.heads):
        keys, values = slice(h * K, h * K + K), slice(h * V, h * V + V)
        q, k, e = (x_TD @ w[keys].T for w in (q_weight, k_weight, module.prefix_key.weight))
        v, u = (x_TD @ w[values].T for w in (module.value.weight, module.prefix_value.weight))
        rows = []
        for i in range(T):
            seen = [(k[j], v[j]) for j in range(i + 1)]
            seen += [(e[m], u[m]) for m in range(min(config.prefix_len, T))]
            scores = [q[i] @ key / K**0.5 for key, _ in seen]
            weights = [1 + t + t * t / 2 for t in scores]
            total = sum(w * value for w, (_, value) in zip(weights, seen, strict=True))
            rows.append(total / (sum(weights) + 1e-6))
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ module.out.weight.T


@pytest.mark.parametrize("length", [1, 3, 11])
@pytest.mark.parametrize("prefix_len", [1, 4, 64])
@torch.no_grad()
def test_output_is_the_published_equation(prefix_len: int, length: int) -> None:
    module = build(prefix_len=prefix_len, heads=2, feature_dim=4)
    x_TD = torch.randn(length, 12, dtype=torch.float64)
    expected = textbook(module, x_TD)
    torch.testing.assert_close(module(x_TD[None])[0], expected, atol=EXACT, rtol=EXACT)


@torch.no_grad()
def test_the_prefix_is_read_whatever_its_order_and_the_rest_is_not() -> None:
    module = build(prefix_len=4)
    module.value.weight.zero_()  # what remains is what the second values hold
    x_BTD = torch.randn(1, 9, 12, dtype=torch.float64)
    x_BTD[:, 5:] = x_BTD[:, 4:5]  # the same query everywhere
    y_BTD = module(x_BTD)
    swapped = x_BTD.clone()
    swapped[:, :4] = x_BTD[:, [2, 0, 3, 1]]
    torch.testing.assert_close(module(swapped)[:, 4:], y_BTD[:, 4:])
    assert not torch.allclose(module(swapped)[:, :4], y_BTD[:, :4])  # queries moved
    changed = x_BTD.clone()
    changed[:, 3] += 1
    assert not torch.allclose(module(changed)[:, :3], y_BTD[:, :3])  # they see token 3


@torch.no_grad()
def test_after_the_prompt_it_is_linear_attention() -> None:
    """The state has the same tensors, and a step does the same to it with the same weights."""
    module = build(prefix_len=4, heads=2)
    based = load_mixer("linear_attention")(make_config("linear_attention", 12, {"heads": 2}))
    based.double().load_state_dict(
        {n: p for n, p in module.state_dict().items() if not n.startswith("prefix")}
    )
    assert module.config.state_spec(9, torch.bfloat16) == based.config.state_spec(9, torch.bfloat16)
    x_BTD = torch.randn(3, 9, 12, dtype=torch.float64)
    _, state = module.mix(x_BTD[:, :6], module.init_state(3, 9, torch.float64, "cpu"))
    expected, _ = based.mix(x_BTD[:, 6:], state)
    y_BTD, _ = module.mix(x_BTD[:, 6:], state)
    torch.testing.assert_close(y_BTD, expected, atol=EXACT, rtol=EXACT)
    for t in range(6, 9):
        y_BD, state = module.step(x_BTD[:, t], state)
        torch.testing.assert_close(y_BD, expected[:, t - 6], atol=EXACT, rtol=EXACT)


PADDED = [(3, 0, 5), (8, 8, 2), (5, 11, 9)]
"""Lengths of three prompts with a prefix of 8: shorter, just as long, and longer; one is empty."""


@pytest.mark.parametrize("lengths", PADDED)
@torch.no_grad()
def test_padding_on_the_left_leaves_no_trace(lengths: tuple[int, ...]) -> None:
    module, longest = build(prefix_len=8, heads=2), max(8, *lengths)
    generator = torch.Generator().manual_seed(0)
    padded = 100 * torch.randn(3, longest + 4, 12, generator=generator, dtype=torch.float64)
    prompts = [torch.randn(1, n + 4, 12, generator=generator).double() for n in lengths]
    exists_BT = torch.zeros(3, longest, dtype=torch.bool)
    for row, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        padded[row, longest - n :] = prompt[0]
        exists_BT[row, longest - n :] = True
    empty = module.init_state(3, longest + 4, torch.float64, "cpu")
    y_BTD, state = module.mix(padded[:, :longest], empty, exists_BT)
    without_state = module(padded[:, :longest], exists_BT)
    steps = [state]
    for row, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        if not n:
            assert not y_BTD[row].any() and not state["memory"][row].any()
            continue
        expected, alone = module.mix(prompt[:, :n], module.init_state(1, n, torch.float64, "cpu"))
        close(y_BTD[row, longest - n :], expected[0])
        close(without_state[row, longest - n :], expected[0])
        for name in state:
            close(state[name][row], alone[name][0])
        rest, _ = module.mix(prompt[:, n:], alone)
        close(module.mix(padded[:, longest:], steps[0])[0][row], rest[0])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=EXACT)


@torch.no_grad()
def test_a_key_of_zero_would_leak_the_values_of_padding() -> None:
    """What the authors' code does: keys set to 0 before the map, and phi(0) is 1 and zeros."""
    q, k, e, v, u = torch.randn(5, 1, 6, 2, 4, dtype=torch.float64).unbind()
    exists_BT = torch.tensor([[False, False, True, True, True, True]])

    def read(start: int, mask: Callable[[Tensor], Tensor], exists_BT: Tensor | None) -> Tensor:
        keys, seconds = mask(k)[:, start:], mask(e)[:, start:]
        memory, normaliser = prefix_state(seconds, u[:, start:], exists_BT=exists_BT)
        return linear_attention(
            q[:, start:],
            keys,
            v[:, start:],
            memory_BHFV=memory,
            normaliser_BHF=normaliser,
            exists_BT=exists_BT,
            backend="reference",
        )[0][:, 2 - start :]

    alone = read(2, lambda x: x, None)
    close(read(0, lambda x: x, exists_BT), alone)
    leaking = read(0, lambda x: x * exists_BT[..., None, None], None)
    assert (leaking - alone).abs().mean() > 0.05
    # All that leaks is the constant: two tokens, each of weight 1, in both sums.
    pads = (v[:, :2] + u[:, :2]).sum(1)
    weights = _weights(q[:, 2:], k[:, 2:], e[:, 2:])
    close(leaking, (alone * (weights + 1e-6) + pads[:, None]) / (weights + 4 + 1e-6))


def _weights(q: Tensor, k: Tensor, e: Tensor) -> Tensor:
    """The denominator of four tokens, all of them prefix, (B, T, H, 1)."""
    causal, whole = (torch.einsum("bthk,bshk->bhts", q, x) / 2 for x in (k, e))
    kernel = [1 + t + t.square() / 2 for t in (causal, whole)]
    return (kernel[0].tril().sum(-1) + kernel[1].sum(-1)).transpose(1, 2)[..., None]


@pytest.mark.parametrize("feature_map", ["taylor", "taylor_full"])
def test_state_as_zoology_counts_it_is_that_of_linear_attention(feature_map: str) -> None:
    config = make_config("prefix_linear", 64, {"heads": 2, "feature_map": feature_map})
    assert config.zoology_state_elements(1024) == 2 * 153 * (32 + 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"heads": 5}, "heads is 5; it must divide the width 32"),
        ({"prefix_len": 0}, "prefix_len is 0; it must be at least 1"),
        ({"feature_dim": 0}, "feature_dim is 0; it must be at least 1"),
        ({"feature_map": "elu"}, "feature_map is elu; it must be taylor or taylor_full"),
    ],
)
def test_values_that_do_not_fit_are_refused(fields: dict[str, Value], sentence: str) -> None:
    with pytest.raises(InfeasibleError, match=sentence):
        make_config("prefix_linear", 32, fields)
