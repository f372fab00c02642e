"""Fold what `vmap` maps into the first dimension of an op, which counts members of a population.

An op over M members serves one model as M = 1; mapped, it is called once over all. So a kernel has
the member as an axis of its grid, and its backward pass is never mapped. Knows no op's mathematics.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def map_over_members(op: Any, shared: frozenset[int] = frozenset()) -> None:
    """Give a custom op, or several results of one, a vmap rule.

    Args:
        op: of tensors whose first dimension is the members, of None and of plain values.
        shared: places of tensors that are one for all members and may not be mapped.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        size: int = info.batch_size
        found = op(*folded(size, in_dims, inputs, shared))
        unfold: Callable[[Tensor], Tensor] = lambda x: x.unflatten(0, (size, -1))  # noqa: E731
        if isinstance(found, Tensor):
            return unfold(found), 0
        return tuple(map(unfold, found)), (0,) * len(found)

    torch.library.register_vmap(op, rule)


def folded(
    size: int,
    in_dims: Sequence[int | None],
    inputs: Sequence[Any],
    shared: frozenset[int] = frozenset(),
) -> list[Any]:
    """Inputs of an op with what is mapped folded in; a tensor that is not mapped is repeated."""

    def fold(place: int, dim: int | None, x: Any) -> Any:
        if not isinstance(x, Tensor) or place in shared:
            assert dim is None
            return x
        stacked = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return stacked.flatten(0, 1)

    pairs = zip(in_dims, inputs, strict=True)
    return [fold(place, dim, x) for place, (dim, x) in enumerate(pairs)]
