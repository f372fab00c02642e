"""References against textbook formulas in fp64, written out a second time token by token.

The formulas here share no code with the kernels, and use no mask, no einsum and no feature map
where there is another way to write the same thing.
"""

import math
from collections.abc import Callable

import pytest
import torch
from archsearch_kernels import Sizes, family
from archsearch_kernels.linear_attention import feature_size
from archsearch_kernels.linear_attention.taylor import features, similarity
from archsearch_kernels.rotary import rotate
from torch import Tensor

EXACT = 1e-10
"""fp64 has 16 digits; a hundred terms of size 1 in another order lose two or three."""


def textbook_attention(q: Tensor, k: Tensor, v: Tensor, at_BT: Tensor | None) -> Tensor:
    B, T, H, K = q.shape
    group = H // k.shape[2]
    rows = []
    for b in range(B):
        for t in range(T):
            for h in range(H):
                seen = range((t if at_BT is None else int(at_BT[b, t])) + 1)
                score = torch.stack([q[b, t, h] @ k[b, j, h // group] for j in seen])
                weight = (score / math.sqrt(K)).exp()
                values = torch.stack([v[b, j, h // group] for j in seen])
                rows.append((weight[:, None] * values).sum(0) / weight.sum())
    return torch.stack(rows).view(B, T, H, -1)


def textbook_window(
    q: Tensor, k: Tensor, v: Tensor, window: int, exists_BS: Tensor | None
) -> Tensor:
    B, T, H, K = q.shape
    older, group = k.shape[1] - T, H // k.shape[2]
    rows = []
    for b in range(B):
        for t in range(T):
            own = older + t
            seen = [
                j
                for j in range(max(0, own - window + 1), own + 1)
                if exists_BS is None or bool(exists_BS[b, j])
            ]
            for h in range(H):
                score = torch.stack([q[b, t, h] @ k[b, j, h // group] for j in seen])
                weight = (score / math.sqrt(K)).exp()
                values = torch.stack([v[b, j, h // group] for j in seen])
                rows.append((weight[:, None] * values).sum(0) / weight.sum())
    return torch.stack(rows).view(B, T, H, -1)


def textbook_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 4 of arXiv:2402.18668 on scores; no state, no features."""
    B, T, H, K = q.shape
    rows = []
    for b in range(B):
        for t in range(T):
            for h in range(H):
                score = (k[b, : t + 1, h] @ q[b, t, h]) / math.sqrt(K)
                weight = 1 + score + score**2 / 2
                rows.append((weight[:, None] * v[b, : t + 1, h]).sum(0) / (weight.sum() + 1e-6))
    return torch.stack(rows).view(B, T, H, -1)


def textbook_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Equation 10 of arXiv:2412.06464 with its matrices written out."""
    B, T, H, K = k.shape
    rows, states = [], []
    for b in range(B):
        for h in range(H):
            S = q.new_zeros(v.shape[-1], K) if state is None else state[b, h]
            for t in range(T):
                key, alpha, rate = k[b, t, h], log_decay[b, t, h].exp(), beta[b, t, h]
                erase = torch.eye(K, dtype=q.dtype) - rate * torch.outer(key, key)
                S = alpha * S @ erase + rate * torch.outer(v[b, t, h], key)
                rows.append(S @ q[b, t, h])
            states.append(S)
    y = torch.stack(rows).view(B, H, T, -1).transpose(1, 2)
    return y, torch.stack(states).view(B, H, -1, K)


def textbook_conv(
    x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """With SiLU, the residual is added too, as the inputs of a check ask for."""
    past = weight.shape[1] - 1
    rows = []
    zeros = x.new_zeros(x.shape[0], past, x.shape[2])
    everything = torch.cat((zeros if tail is None else tail, x), 1)
    for t in range(x.shape[1]):
        conv = bias + sum(weight[:, j] * everything[:, t + j] for j in range(past + 1))
        if silu:
            conv = conv / (1 + torch.exp(-conv))
        rows.append(conv * gate[:, t] + silu * x[:, t])
    return torch.stack(rows, 1), everything[:, everything.shape[1] - past :]


TEXTBOOK: dict[str, Callable[..., object]] = {
    "attention": lambda q_BTHK, k_BSGK, v_BSGV, at_BT: textbook_attention(
        q_BTHK, k_BSGK, v_BSGV, at_BT
    ),
    "sliding_window": lambda q_BTHK, k_BSGK, v_BSGV, window, exists_BS: textbook_window(
        q_BTHK, k_BSGK, v_BSGV, window, exists_BS
    ),
    "gated_delta": lambda q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state_BHVK=None: (
        textbook_delta(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state_BHVK)
    ),
    "short_conv": lambda x_BTC, gate_BTC, weight_CJ, bias_C, silu, residual, tail_BPC=None: (
        textbook_conv(x_BTC, gate_BTC, weight_CJ, bias_C, tail_BPC, silu)
    ),
}


def results_and_gradients(
    op: Callable[..., object], tensors: dict[str, Tensor], options: dict[str, object]
) -> list[Tensor]:
    inputs = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    result = op(**inputs, **options)
    outputs = list(result) if isinstance(result, tuple) else [result]
    weights = [torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), weights)]


@pytest.mark.parametrize("name", sorted(TEXTBOOK))
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "head_size"), [(1, 2, 3), (7, 1, 5), (12, 4, 6)])
def test_reference_is_the_textbook_formula(
    name: str, state: bool, tokens: int, heads: int, head_size: int
) -> None:
    one = family(name)
    sizes = Sizes(batch=3, tokens=tokens, heads=heads, head_size=head_size, state=state)
    call = one.make_inputs(sizes)
    expected = results_and_gradients(TEXTBOOK[name], dict(call.tensors), dict(call.options))
    options = {**call.options, "backend": "reference"}
    found = results_and_gradients(one.op, dict(call.tensors), options)
    for mine, textbook in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, textbook, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize(("tokens", "heads", "head_size"), [(1, 2, 3), (7, 1, 5), (12, 2, 6)])
def test_linear_reference_is_the_textbook_formula(tokens: int, heads: int, head_size: int) -> None:
    one = family("linear_attention")
    sizes = Sizes(batch=2, tokens=tokens, heads=heads, head_size=head_size, state=False)
    tensors = dict(one.make_inputs(sizes).tensors)
    expected = results_and_gradients(
        lambda q_BTHK, k_BTHK, v_BTHV: textbook_linear(q_BTHK, k_BTHK, v_BTHV), tensors, {}
    )

    def reference(**inputs: Tensor) -> Tensor:
        y, _, _ = one.op(**inputs, keep_state=False, backend="reference")
        return y

    for mine, textbook in zip(results_and_gradients(reference, tensors, {}), expected, strict=True):
        torch.testing.assert_close(mine, textbook, atol=EXACT, rtol=EXACT)


def test_linear_state_continues_the_sums_over_all_tokens() -> None:
    one = family("linear_attention")
    sizes = Sizes(batch=2, tokens=9, heads=2, head_size=4, state=False)
    tensors = one.make_inputs(sizes).tensors
    whole = textbook_linear(*tensors.values())
    first = {name: x[:, :4] for name, x in tensors.items()}
    rest = {name: x[:, 4:] for name, x in tensors.items()}
    y1, memory, normaliser = one.op(**first, backend="reference")
    y2, _, _ = one.op(**rest, memory_BHFV=memory, normaliser_BHF=normaliser, backend="reference")
    torch.testing.assert_close(torch.cat((y1, y2), 1), whole, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 24])
def test_taylor_features_have_the_taylor_kernel(size: int) -> None:
    q, k = torch.randn(2, 50, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    score = (q * k).sum(-1) / math.sqrt(size)
    full = torch.cat(  # the uncompressed map of the published code: 1 + K + K^2 features
        [
            torch.ones(50, 1, dtype=torch.float64),
            q * k / math.sqrt(size),
            (q[:, :, None] * q[:, None] * k[:, :, None] * k[:, None]).flatten(1) / (2 * size),
        ],
        dim=1,
    ).sum(1)
    found = (features(q) * features(k)).sum(-1)
    torch.testing.assert_close(found, 1 + score + score**2 / 2, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, full, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, similarity(score), atol=1e-12, rtol=1e-12)
    assert features(q).shape[-1] == feature_size("taylor", size)


def test_taylor_map_of_16_has_153_features_and_273_in_full() -> None:
    assert (feature_size("taylor", 16), feature_size("taylor_full", 16)) == (153, 273)


def test_unknown_feature_map_is_named_with_what_exists() -> None:
    with pytest.raises(ValueError, match="no feature map 'gelu'; there are: taylor, "):
        feature_size("gelu", 16)


def test_rotation_depends_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    near = (rotate(q, torch.tensor([7])) * rotate(k, torch.tensor([4]))).sum()
    far = (rotate(q, torch.tensor([100_007])) * rotate(k, torch.tensor([100_004]))).sum()
    torch.testing.assert_close(near, far, atol=1e-9, rtol=1e-9)  # 1e5 takes 5 of 16 digits


def test_rotation_in_fp32_keeps_its_digits_at_large_positions() -> None:
    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([0, 4_097, 100_001])
    exact = rotate(x.double(), position)
    torch.testing.assert_close(rotate(x, position).double(), exact, atol=1e-6, rtol=0)
    assert rotate(x.bfloat16(), position).dtype == torch.bfloat16


def test_rotation_takes_positions_for_each_sequence() -> None:
    x = torch.randn(2, 3, 1, 4)
    position_BT = torch.tensor([[0, 1, 2], [5, 6, 7]])
    each = torch.stack([rotate(x[b : b + 1], position_BT[b])[0] for b in range(2)])
    torch.testing.assert_close(rotate(x, position_BT), each)
