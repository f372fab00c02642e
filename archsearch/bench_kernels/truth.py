"""What the benchmarked functions are, in fp64 and without chunks, for a few rows of their inputs.

The result of the very run that is timed is compared: some queries of the first sequence and head
and of the last, and every gradient of the last one. Knows nothing of how anything is computed.

Shape suffixes: R chosen queries, S keys, K query and key size, V value size.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from archsearch.bench_kernels.cases import Case, inputs

CHECKED_QUERIES = 48
"""Queries at the start, in the middle and at the end of a sequence that are compared."""

ALLOWED = 0.01
"""Relative error of a result in half precision; one rounding is 0.002."""


def error(case: Case, computes: str, given: Mapping[str, Tensor], found: Sequence[Tensor]) -> float:
    """Largest relative error of outputs and gradients that a variant returned; infinite if none.

    Args:
        computes: `taylor`, `elu`, `window`, `softmax`, `conv_silu`, `conv_gate`, or `elu_sum`,
            without a denominator.
        found: y, and in training the gradients of the case's leaves.
    """
    if case.taps:
        return _of_convolution(case, given, found)
    if case.work == "step":
        return _of_step(case, given, found)
    B, T, H = given["q"].shape[:3]
    third = min(CHECKED_QUERIES, T) // 3 or 1
    rows = sorted({*range(third), *range(T // 2, min(T, T // 2 + third)), *range(T - third, T)})
    errors = []
    for b, h in ((0, 0), (B - 1, H - 1)):
        one = {name: x[b, :, h].double() for name, x in given.items()}
        at = torch.tensor(rows, device=one["q"].device)
        errors.append(_difference(found[0][b, at, h], _outputs(case, computes, one, at)))
    if case.work == "training":
        leaves = {name: one[name].requires_grad_() for name in ("q", "k", "v")}
        y = _outputs(case, computes, leaves, torch.arange(T, device=one["q"].device))
        gradients = torch.autograd.grad(y, list(leaves.values()), one["dy"])
        pairs = zip(found[1:], gradients, strict=True)
        errors += [_difference(mine[B - 1, :, H - 1], exact) for mine, exact in pairs]
    return max(errors)


def _outputs(case: Case, computes: str, one: Mapping[str, Tensor], at_R: Tensor) -> Tensor:
    q_RK, k_SK = one["q"][at_R], one["k"]
    distance_RS = at_R[:, None] - torch.arange(len(k_SK), device=at_R.device)
    sees_RS = distance_RS >= 0
    if computes == "window":
        sees_RS = sees_RS & (distance_RS < case.window)
    weight_RS, v_SV = _weights(computes, q_RK, k_SK, sees_RS), one["v"]
    if case.work == "prefix":
        everywhere = torch.ones_like(sees_RS[:, : len(one["k_first"])])
        weight_RS = torch.cat((_weights(computes, q_RK, one["k_first"], everywhere), weight_RS), 1)
        v_SV = torch.cat((one["v_first"], v_SV))
    if computes == "elu_sum":
        return weight_RS @ v_SV
    return weight_RS @ v_SV / (weight_RS.sum(1, keepdim=True) + 1e-6)


def _weights(computes: str, q_RK: Tensor, k_SK: Tensor, sees_RS: Tensor) -> Tensor:
    score_RS = q_RK @ k_SK.mT / math.sqrt(q_RK.shape[-1])
    if computes == "taylor":
        return (1 + score_RS + score_RS.square() / 2) * sees_RS
    if computes in ("elu", "elu_sum"):
        return (F.elu(q_RK) + 1) @ (F.elu(k_SK) + 1).mT * sees_RS
    score_RS = score_RS.masked_fill(~sees_RS, -torch.inf)
    return (score_RS - score_RS.amax(1, keepdim=True)).exp()


def _of_convolution(case: Case, given: Mapping[str, Tensor], found: Sequence[Tensor]) -> float:
    """All rows: the gradients of taps are sums over them."""
    is_training = case.work == "training"
    leaves = {name: x.double().requires_grad_(is_training) for name, x in given.items()}
    padded = F.pad(leaves["x"].mT, (case.taps - 1, 0))
    weight = leaves["weight"][:, None]
    y = F.conv1d(padded, weight, leaves["bias"], groups=case.channels).mT
    y = F.silu(y) if case.mixing == "conv_silu" else y * leaves["gate"] + leaves["x"]
    exact = [y]
    if is_training:
        asked = [leaves[name] for name in case.leaves]
        exact += torch.autograd.grad(y, asked, leaves["dy"])
    return max(_difference(mine, one.detach()) for mine, one in zip(found, exact, strict=True))


def _of_step(case: Case, given: Mapping[str, Tensor], found: Sequence[Tensor]) -> float:
    """After n steps of the same token, which the constant's normaliser has counted."""
    from archsearch_kernels.linear_attention.taylor import features

    begun = inputs(case, given["q"].dtype, given["q"].device.type)
    errors = []
    for b, h in ((0, 0), (case.batch - 1, case.heads - 1)):
        q, k, v = (given[name][b, 0, h].double() for name in ("q", "k", "v"))
        y, memory, normaliser = (x[b, h].double() for x in found[:3])
        memory_0, normaliser_0 = (begun[name][b, h].double() for name in ("memory", "normaliser"))
        steps, query, key = (normaliser - normaliser_0)[0], features(q), features(k)
        errors.append(_difference(memory, memory_0 + steps * key[:, None] * v))
        errors.append(_difference(normaliser, normaliser_0 + steps * key))
        errors.append(_difference(y, query @ memory / (query @ normaliser + 1e-6)))
    return max(errors)


def _difference(found: Tensor, exact: Tensor) -> float:
    difference = float((found.double() - exact).norm() / exact.norm())
    return difference if math.isfinite(difference) else math.inf
