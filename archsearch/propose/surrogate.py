"""What trained architectures say of untrained ones: a Gaussian process on their features.

An architecture becomes numbers: which mixer stands at which depth and with which sizes, how often
each mixer stands anywhere, and what is known of it without training. Exponential kernel, which
asks for no smoothness between neighbours; exact inference; length scale, weights and noise are
those of a small grid with the highest marginal likelihood (Rasmussen and Williams, 2006, eq. 4.18,
algorithm 2.1 and section 5.4.1). Knows nothing of studies or samplers.

Shape suffixes: N trained, Q asked, F features.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.space import Value

_LENGTHS = (1.0, 2.0, 4.0)
"""In typical distances between two architectures."""
_PLACED = (0.3, 1.0)
"""Weights of what says at which depth something stands; what does not has weight 1."""
_NOISES = (1e-3, 3e-2)
"""Share of the variance that is noise."""

Features = Mapping[str, float]


def features(arch: ArchSpec, known: Mapping[str, float]) -> Features:
    """What tells an architecture from others of its space.

    Args:
        known: metrics that the architecture alone decides.
    """
    found = {f"known {name}": math.log2(1 + max(0.0, value)) for name, value in known.items()}
    found |= _of_value("width", arch.width) | _of_value("ratio", arch.channel_mixer.ratio)
    found[f"channel mixer {arch.channel_mixer.kind}"] = 1.0
    for depth, layer in enumerate(arch.layers):
        for name, value in _of_layer(layer):
            found[f"at {depth} {name}"] = value
            found[name] = found.get(name, 0.0) + value
    return found


def _of_layer(layer: LayerSpec) -> Iterator[tuple[str, float]]:
    yield layer.mixer, 1.0
    for name, value in layer.fields.items():
        yield from _of_value(f"{layer.mixer} {name}", value).items()
    for part in layer.parts:
        yield from ((f"{layer.mixer} {name}", value) for name, value in _of_layer(part))


def _of_value(name: str, value: Value) -> dict[str, float]:
    """Sizes by their logarithm; of anything else, that it is this."""
    if type(value) in (int, float):
        return {name: math.log2(1 + abs(float(value)))}
    return {f"{name} {value}": 1.0}


@dataclass(frozen=True)
class Predicted:
    """Mean and standard deviation for each architecture asked about."""

    mean: Tensor
    deviation: Tensor


class Surrogate:
    """Trained architectures and those that are asked about, ready for any number of targets.

    Args:
        trained: features of N architectures.
        asked: features of Q architectures.
    """

    def __init__(self, trained: Sequence[Features], asked: Sequence[Features]) -> None:
        count = len(trained)
        placed, free = _scaled([*trained, *asked])
        squares = [_squares(part[:count], part) for part in (placed, free)]
        self._squares = {weight: weight * squares[0] + squares[1] for weight in _PLACED}
        self._count = count

    def predict(self, targets: Sequence[float]) -> Predicted:
        """Predict a target of the asked architectures from its values for the trained ones."""
        y_N = torch.tensor(targets, dtype=torch.float64)
        centre, scale = y_N.mean(), y_N.std(unbiased=False).clamp_min(1e-9)
        y_N = (y_N - centre) / scale
        grid = itertools.product(_PLACED, _LENGTHS, _NOISES)
        fits = [self._fit(y_N, *point) for point in grid]
        best = max(fits, key=lambda fit: fit.evidence)
        across_NQ = best.kernel[:, self._count :]
        mean_Q = across_NQ.T @ best.weights
        half_NQ = torch.linalg.solve_triangular(best.factor, across_NQ, upper=False)
        variance_Q = (1 - half_NQ.square().sum(0)).clamp_min(1e-6)
        return Predicted(centre + scale * mean_Q, scale * variance_Q.sqrt())

    def _fit(self, y_N: Tensor, weight: float, length: float, noise: float) -> "_Fit":
        squares = self._squares[weight]
        typical = squares.mean().clamp_min(1e-9)
        kernel = torch.exp(-(squares / typical).sqrt() / length)
        own_NN = (1 - noise) * kernel[:, : self._count] + noise * torch.eye(self._count)
        factor_NN = torch.linalg.cholesky(own_NN)
        weights_N = torch.cholesky_solve(y_N.unsqueeze(1), factor_NN).squeeze(1)
        evidence = -0.5 * float(y_N @ weights_N) - float(factor_NN.diagonal().log().sum())
        return _Fit((1 - noise) * kernel, factor_NN, weights_N, evidence)


@dataclass(frozen=True)
class _Fit:
    kernel: Tensor
    factor: Tensor
    weights: Tensor
    evidence: float


def distances(left: Sequence[Features], right: Sequence[Features]) -> Tensor:
    """Distance of every architecture of one list from every one of another."""
    count = len(left)
    tables = _scaled([*left, *right])
    squares = [_squares(table[:count], table[count:]) for table in tables]
    return torch.stack(squares).sum(dim=0).sqrt()


def _scaled(rows: Sequence[Features]) -> tuple[Tensor, Tensor]:
    """Features as two matrices, those with a depth and those without, each from 0 to 1."""
    names = sorted({name for row in rows for name in row})
    columns = {name: index for index, name in enumerate(names)}
    places: list[int] = []
    values: list[float] = []
    for index, row in enumerate(rows):
        places += [index * len(names) + columns[name] for name in row]
        values += row.values()
    flat = torch.zeros(len(rows) * len(names), dtype=torch.float64)
    flat[torch.tensor(places)] = torch.tensor(values, dtype=torch.float64)
    table = flat.view(len(rows), len(names))
    low, high = table.min(dim=0).values, table.max(dim=0).values
    table = (table - low) / (high - low).clamp_min(1e-9)
    placed = torch.tensor([name.startswith("at ") for name in names])
    return table[:, placed], table[:, ~placed]


def _squares(left: Tensor, right: Tensor) -> Tensor:
    """Squared distances between rows."""
    inner = left @ right.T
    return (left.square().sum(1)[:, None] + right.square().sum(1)[None] - 2 * inner).clamp_min(0)
