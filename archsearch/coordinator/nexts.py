"""What is proposed next: what the study begins with first, then the sampler, beside it what is new.

Duplicates and infeasible architectures cost nothing and count for nothing, but a sampler can stick
to them (a model-based one does: what was best is what it proposes). So a duplicate is followed by
an architecture near it that was never proposed. If there is none near, a small space is looked
through for any that is left, and when none is, it is exhausted. In a space too large for that, a
hundred trials in a row without a new architecture end the study. A function of the study and its
trials so far alone.
"""

import itertools
import random
from collections.abc import Mapping, Sequence

from archsearch.compose import Assignment, count
from archsearch.coordinator.book import Book
from archsearch.gate import is_excluded
from archsearch.propose.corners import SMALL, neighbours, shuffled, warm_start
from archsearch.propose.sampler import Proposal, Proposer
from archsearch.space import Value
from archsearch.spec import StudySpec

STUCK_SMALL = 5
STUCK_LARGE = 100
_LOOKED_AT = 100
"""Architectures near a duplicate that are looked at to find a new one."""


class Nexts:
    """Gives the next proposal of one study.

    Args:
        borrowed: decisions that lead to the trials of other studies that it begins with.
    """

    def __init__(
        self,
        spec: StudySpec,
        proposer: Proposer,
        book: Book,
        borrowed: Sequence[Sequence[Mapping[str, Value]]] = (),
    ) -> None:
        self._spec = spec
        self._proposer = proposer
        self._book = book
        self._is_small = count(spec.model) <= SMALL
        self._left: list[Assignment] | None = None
        most = len(spec.search.warm_start) + sum(map(len, borrowed))
        self._starts = warm_start(spec, borrowed) if len(book) < most else []

    def next(self) -> Proposal | None:
        """The next proposal; None if there is nothing new left to propose."""
        number = len(self._book)
        if number < len(self._starts):
            return self._proposer.take(self._starts[number].params)
        stuck = self._book.free_in_a_row
        if not stuck:
            return self._proposer.ask()
        if self._is_small and self._unseen() is None:
            return None
        if self._book[number - 1].duplicate_of is not None or stuck >= STUCK_SMALL:
            one = self._near(self._book[number - 1].params) or self._unseen()
            if one is not None:
                return self._proposer.take(one.params)
        return self._proposer.ask() if stuck < STUCK_LARGE else None

    def _near(self, params: Mapping[str, Value]) -> Assignment | None:
        """An architecture near one that is feasible and was never proposed."""
        if not params:
            return None
        rng = random.Random(f"{self._spec.seed}:{len(self._book)}")
        near = neighbours(self._spec.model, params, rng)
        return next(filter(self._is_new, itertools.islice(near, _LOOKED_AT)), None)

    def _unseen(self) -> Assignment | None:
        """Of a small space, some architecture that is feasible and was never proposed."""
        if not self._is_small:
            return None
        if self._left is None:
            self._left = shuffled(self._spec)
        while self._left and not self._is_new(self._left[-1]):
            self._left.pop()
        return self._left[-1] if self._left else None

    def _is_new(self, one: Assignment) -> bool:
        return not self._book.is_known(one.arch) and not is_excluded(one.arch, self._spec)
