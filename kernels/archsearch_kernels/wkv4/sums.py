"""Sums of exponentials kept as (numerator, denominator, exponent), and how two of them add up.

Shape suffixes: X any shape, the same for the parts of both sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = -1e30
"""Exponent of an empty sum: below every other, and finite, so that no difference is undefined."""


class Sums(NamedTuple):
    """A sum of values under exponentials is numerator exp(exponent), that of the exponentials alone
    denominator exp(exponent)."""

    numerator: Tensor
    denominator: Tensor
    exponent: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "Sums":
        """Change every part in the same way."""
        return Sums(*map(change, self))


def joined(older: Sums, newer: Sums, log_decay_X: Tensor | None) -> Sums:
    """Add two sums, the older one decayed by exp(log_decay) (None: not at all)."""
    before = older.exponent if log_decay_X is None else older.exponent + log_decay_X
    largest = torch.maximum(before, newer.exponent)
    keep, add = (before - largest).exp(), (newer.exponent - largest).exp()
    return Sums(
        keep * older.numerator + add * newer.numerator,
        keep * older.denominator + add * newer.denominator,
        largest,
    )


def started(state: Sums | None, like_X: Tensor, log_decay_X: Tensor) -> Sums:
    """The sums to begin with; those that are empty get an exponent that says so.

    Empty sums have decayed too. That changes no number, and gives the decay a gradient of zero
    where a lone token leaves it without any.
    """
    nothing = NOTHING + log_decay_X
    if state is None:
        zeros = torch.zeros_like(like_X)
        return Sums(zeros, zeros, zeros + nothing)
    return state._replace(exponent=state.exponent.where(state.denominator > 0, nothing))
