"""Where features stand in the tiles of the Triton programs, and in states as callers have them.

With P the power of two at or above K, feature f of the programs is x_a x_b for a = f mod P and

    f <  P^2/2              b = (a + f div P) mod P: every pair less than half around a circle of P
    f <  P^2/2 + P/2        b = a + P/2: the pairs half around, once each
    f =  P^2/2 + P/2        the constant 1
    f in P^2/2 + P ...      x_a alone, for P features

and 0 elsewhere. So the first factor is the same in each tile of 64, which is a multiple of P.
States as callers have them are in the order and with the factors of
`archsearch_kernels.linear_attention.taylor.features`, whose cross terms go by the distance around a
circle of K. Knows nothing of Triton.

Shape suffixes: N tiles, D padded key size, G features of a tile, F features.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
"""Features of a tile: what a warpgroup multiplies at once."""

NONE, PUBLIC, PART = range(3)
"""How a state is laid out: there is none; as callers have it; as parts of a sequence leave it."""


class Layout(NamedTuple):
    """Sizes that follow from the key size K.

    Attributes:
        circle: P, the power of two at or above K.
        depth: K padded to what a matrix unit takes.
        tiles: how many tiles of features there are.
        features: F of the caller.
    """

    circle: int
    depth: int
    tiles: int
    features: int


class Tables(NamedTuple):
    """Constants on a device.

    Attributes:
        of_query: [2 N, D, G] the matrices of the first and second factor in each tile; squares
            count 1/2.
        of_key: the same, all of them 1.
        places: where each feature stands in a state of the caller, -1: nowhere.
        factor: [2, N G] what a feature of the caller is of the program's, and its inverse.
        pairs: [2, F] the numbers whose product a feature of the caller is; -1: the constant 1.
        weight: [F] what it is multiplied by.
    """

    of_query: Tensor
    of_key: Tensor
    places: Tensor
    factor: Tensor
    pairs: Tensor
    weight: Tensor


def layout(key_size: int) -> Layout:
    """Sizes for a key size from 4 to 32."""
    circle = 1 << (key_size - 1).bit_length()
    used = circle**2 // 2 + 2 * circle
    features = 1 + key_size + key_size * (key_size + 1) // 2
    return Layout(circle, max(16, circle), -(-used // TILE), features)


@cache
def tables(key_size: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """The constants for a key size: matrices in `dtype`, made once for a device.

    They are copied from the host, which a capture refuses: call once before it.
    """
    sizes = layout(key_size)
    shape = (2 * sizes.tiles, sizes.depth, TILE)
    of_query, of_key = torch.zeros(2, *shape).unbind()
    of_query[::2] = of_key[::2] = _first(sizes)
    pairs = _caller_pairs(key_size)
    place_of = {tuple(sorted(pair)): place for place, pair in enumerate(pairs)}
    places = [-1] * (sizes.tiles * TILE)
    for feature, (a, b) in _program_pairs(sizes.circle):
        places[feature] = place_of.get(tuple(sorted((a, b))), -1)
        if b >= 0 and b < sizes.depth:
            tile, column = divmod(feature, TILE)
            of_key[2 * tile + 1, b, column] = 1
            of_query[2 * tile + 1, b, column] = 0.5 if a == b else 1
    weight = torch.tensor([_weight(key_size, *pair) for pair in pairs])
    place = torch.tensor(places)
    factor = torch.where(place >= 0, weight[place], 0)
    inverse = torch.where(place >= 0, 1 / weight[place], 0)
    return Tables(
        of_query.to(device, dtype),
        of_key.to(device, dtype),
        place.to(device, torch.int32),
        torch.stack((factor, inverse)).to(device),
        torch.tensor(pairs, dtype=torch.int32).mT.contiguous().to(device),
        weight.to(device),
    )


def _first(sizes: Layout) -> Tensor:
    """[D, G], one where the first factor of a column is that number."""
    a_G = torch.arange(TILE) % sizes.circle
    return (torch.arange(sizes.depth)[:, None] == a_G).float()


def _program_pairs(circle: int) -> list[tuple[int, tuple[int, int]]]:
    """(feature, (a, b)) of the programs; b is -1 in a linear feature, and both in the constant."""
    half, products = circle // 2, circle * circle // 2
    return [
        *((a + circle * s, (a, (a + s) % circle)) for s in range(half) for a in range(circle)),
        *((products + a, (a, a + half)) for a in range(half)),
        (products + half, (-1, -1)),
        *((products + circle + a, (a, -1)) for a in range(circle)),
    ]


def _caller_pairs(key_size: int) -> list[tuple[int, int]]:
    """(a, b) of the features in `taylor.features`, with -1 as above."""
    pairs = [(-1, -1), *((a, -1) for a in range(key_size)), *((a, a) for a in range(key_size))]
    for distance in range(1, key_size // 2 + 1):
        count = key_size if 2 * distance < key_size else distance
        pairs += [(a, (a + distance) % key_size) for a in range(count)]
    return pairs


def _weight(key_size: int, a: int, b: int) -> float:
    """What a feature of the caller is of the product of its numbers."""
    if a < 0:
        return 1.0
    if b < 0:
        return 1 / math.sqrt(math.sqrt(key_size))
    return math.sqrt((0.5 if a == b else 1.0) / key_size)
