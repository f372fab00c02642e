"""The peers of a trial: what early stopping holds it against, fixed when the trial is proposed.

They are the trials whose end the sampler had been told of by then, so a study of one seed stops the
same trials every time, whichever of them finishes first and however often its coordinator restarts.
"""

from collections.abc import Sequence

from archsearch.coordinator.book import Book, Entry
from archsearch.messages import Peers, Rung
from archsearch.records import TrialState
from archsearch.spec import StudySpec, TrainSpec
from archsearch.stopping import decision_rungs, point_of, quality


def peers_of(spec: StudySpec, book: Book, entry: Entry) -> Peers | None:
    """The peers of a trial; None if its study stops no trial early.

    A peer is stopped, or complete within all limits: the others have no place on the front.
    """
    rule = spec.search.early_stopping
    if rule is None:
        return None
    peers = [
        one for one in book.entries[: entry.told] if one.feasible or one.state is TrialState.STOPPED
    ]
    points = {
        rung: tuple(
            point_of(spec.objectives, peer.rung_recalls[rung], peer.metrics)
            for peer in peers
            if len(peer.rung_recalls) > rung
        )
        for rung in decision_rungs(rule, spec.train.rungs)
    }
    return Peers(rule=rule, objectives=spec.objectives, known=entry.metrics, points=points)


def rung_recalls(train: TrainSpec, rungs: Sequence[Rung]) -> tuple[float, ...]:
    """Recall of the best learning rate at each rung, on the selection split."""
    return tuple(quality(train.member_rates, rung.selection_recall) for rung in rungs)
