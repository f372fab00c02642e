"""Batches of resident examples, fetched by a counter on the device, and their order in an epoch.

As in the published recipe, every epoch runs the segments in the order of the task, short to long,
without shuffling; a segment's last batch may be smaller. The examples stay where they are: fresh
ones take the place of the old, so that captured work finds them.
Knows nothing of models.

Shape suffixes: B batch, T tokens, K labelled positions.
"""

import torch
from torch import Tensor

from archsearch.mqar import Examples


class Feed:
    """Batches of one shape, fetched by a counter on the device, from `first` on, round and round.

    Args:
        rows: rows that the batches cover; a multiple of `size`.
    """

    def __init__(self, examples: Examples, first: int, rows: int, size: int) -> None:
        self.examples = examples
        self.first, self.rows = first, rows
        device = examples.tokens.device
        self.index_B = torch.arange(size, device=device)
        self.next = torch.zeros(1, dtype=torch.int64, device=device)

    def seek(self, fetched: int) -> None:
        """Move to where it is after so many batches since its making."""
        self.next.fill_(fetched * len(self.index_B) % self.rows)

    @property
    def batches(self) -> int:
        """Batches until it comes round."""
        return self.rows // len(self.index_B)

    def fetch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens_BT, at_BK, labels_BK as int64 and move on."""
        index_B = self.index_B + self.next + self.first
        self.next.add_(len(self.index_B)).remainder_(self.rows)
        parts = (self.examples.tokens, self.examples.at, self.examples.labels)
        tokens_BT, at_BK, labels_BK = (part.index_select(0, index_B).long() for part in parts)
        return tokens_BT, at_BK, labels_BK


def epoch_feeds(data: tuple[Examples, ...], batch: int) -> list[Feed]:
    """The batches of one epoch, in order; entries of one shape and segment are one object."""
    plan: list[Feed] = []
    for examples in data:
        whole = len(examples) // batch
        rest = len(examples) - whole * batch
        if whole:
            plan += [Feed(examples, 0, whole * batch, batch)] * whole
        if rest:
            plan.append(Feed(examples, whole * batch, rest, rest))
    return plan


def fetched_before(feed: Feed, plan: list[Feed], step: int) -> int:
    """Batches of a feed that are fetched before a step of a training whose epochs are `plan`."""
    epochs, steps = divmod(step, len(plan))
    return epochs * plan.count(feed) + plan[:steps].count(feed)


def replace_examples(data: tuple[Examples, ...], fresh: tuple[Examples, ...]) -> None:
    """Copy other examples of the same segments into the tensors of these."""
    for old, new in zip(data, fresh, strict=True):
        old.tokens.copy_(new.tokens)
        old.at.copy_(new.at)
        old.labels.copy_(new.labels)
