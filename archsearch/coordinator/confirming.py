"""Confirming the front: training its members once more, with seeds that took no part in the search.

The best of many noisy scores is too good by chance. So once nothing else is left to do, every
member of the front is trained with fresh seeds at the learning rate that was chosen for it, and
its recall is replaced by theirs. That can bring others to the front, which are confirmed in turn,
until every member is. The sampler hears nothing of it. A function of the study and its trials.
"""

import hashlib

from archsearch.coordinator.book import Book, Entry
from archsearch.front import costs
from archsearch.messages import TrialRequest
from archsearch.pareto import ranks
from archsearch.spec import StudySpec


class Confirming:
    """Which trials are still to be confirmed, and what is asked of a worker for it."""

    def __init__(self, spec: StudySpec, book: Book) -> None:
        self._spec = spec
        self._book = book
        self._given_up: set[int] = set()

    def wanted(self) -> list[Entry]:
        """Members of the front, as far as it is known now, that have no fresh seeds yet."""
        feasible = [entry for entry in self._book.entries if entry.feasible]
        found = ranks([costs(self._spec, entry.believed) for entry in feasible])
        return [
            entry
            for entry, rank in zip(feasible, found, strict=True)
            if rank == 0 and entry.confirmed_recall is None and entry.number not in self._given_up
        ]

    def give_up(self, entry: Entry) -> None:
        """Try no more in this run."""
        self._given_up.add(entry.number)

    def request(self, searched: TrialRequest, entry: Entry, seeds: int) -> TrialRequest:
        """What was asked of a worker in the search, with fresh seeds and without the profile."""
        assert entry.learning_rate is not None
        train = {"learning_rates": (entry.learning_rate,), "seeds": seeds}
        return searched.model_copy(
            update={
                "train": self._spec.train.model_copy(update=train),
                "seed": fresh_seed(self._spec.seed),
                "profile_wanted": False,
                "peers": None,
            }
        )


def fresh_seed(seed: int) -> int:
    """A seed of 32 bits that depends on the study's alone and is another one."""
    return int.from_bytes(hashlib.sha256(f"confirm:{seed}".encode()).digest()[:4], "big")
