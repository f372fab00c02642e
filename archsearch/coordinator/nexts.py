"""What is proposed next: corners of the space first, then the sampler, then what is left.

Duplicates and infeasible architectures cost nothing and count for nothing, but a sampler can stick
to them. In a small space, after a few in a row, one architecture that was never proposed is taken
instead; when none is left, the space is exhausted. In a large one a hundred in a row end the study.
A function of the study and its trials so far alone.
"""

from archsearch.compose import count
from archsearch.coordinator.book import Book
from archsearch.gate import gate
from archsearch.propose.corners import SMALL, Assignment, shuffled, warm_start
from archsearch.propose.sampler import Proposal, Proposer
from archsearch.spec import StudySpec

STUCK_SMALL = 5
STUCK_LARGE = 100


class Nexts:
    """Gives the next proposal of one study."""

    def __init__(self, spec: StudySpec, proposer: Proposer, book: Book) -> None:
        self._spec = spec
        self._proposer = proposer
        self._book = book
        self._is_small = count(spec.model) <= SMALL
        self._left: list[Assignment] | None = None
        wanted = len(spec.search.warm_start)
        self._corners = warm_start(spec) if len(book) < wanted else []

    def next(self) -> Proposal | None:
        """The next proposal; None if there is nothing new left to propose."""
        if len(self._book) < len(self._corners):
            return self._proposer.place(self._corners[len(self._book)].params, {})
        stuck = self._book.free_in_a_row
        if self._is_small and stuck:
            one = self._unseen()
            if one is None:
                return None
            if stuck >= STUCK_SMALL:
                return self._proposer.place(one.params, {})
        elif stuck >= STUCK_LARGE:
            return None
        return self._proposer.ask()

    def _unseen(self) -> Assignment | None:
        """The last architecture of the shuffled space that is feasible and was never proposed."""
        if self._left is None:
            self._left = shuffled(self._spec)
        while self._left:
            one = self._left[-1]
            if not self._book.is_known(one.arch) and not gate(one.arch, self._spec).violations:
                return one
            self._left.pop()
        return None
