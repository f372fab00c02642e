"""Multi-query associative recall (MQAR): the data of a task, from its spec, seed and split alone.

Layout of Arora et al., "Zoology" (arXiv:2312.04927) and "Based" (arXiv:2402.18668): K key-value
pairs first (2K tokens), then a query region of L - 2K tokens. Every key is queried exactly once, at
an even offset 2K + 2g; the gaps g are drawn without replacement with p(i) ~ i^(a - 1), i = g + 1.
The label, at a query only, is the value of the queried key. Keys come from [1, V/2), values from
[V/2, V), both without replacement; the rest is filler: uniform over the vocabulary, or token 0.

That is the plain prompt. The others, after "Just read twice" (arXiv:2407.05483), put tokens before
the same sequence: `twice` the K pairs once more (2K tokens), `question_first` the K queried keys in
the order in which they will be asked. So an example asks the same under every prompt, for the same
values, and only the places move. As every key is queried, a question put first tells no key to
leave out; it tells the order.

A filler token can equal a key by chance, so a perfect score is a little under 1 at high K.
Nothing here depends on a model, a device, a batch size or the order of trials.

Shape suffixes: N examples, L tokens, K pairs; R rows of one chunk, A tokens put first.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from archsearch.errors import UsageError
from archsearch.spec import MqarSpec, Segment

Split = Literal["train", "selection", "report"]
_CHUNK_ROWS = 2048


@dataclass(frozen=True)
class Examples:
    """One segment of a split, resident on a device.

    Attributes:
        name: of the segment; its key in results.
        tokens: int32 [N, L].
        at: int32 [N, K], positions of the queries, in the order of the pairs.
        labels: int32 [N, K], values of the queried keys.
        prefix: tokens before the first place where a query may stand.
    """

    name: str
    tokens: Tensor
    at: Tensor
    labels: Tensor
    prefix: int

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (tokens_BL, at_BK, labels_BK) as int64, in order; the last may be smaller."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield self.tokens[rows].long(), self.at[rows].long(), self.labels[rows].long()


def generate(
    spec: MqarSpec, split: Split, device: torch.device | str, epoch: int = 0
) -> tuple[Examples, ...]:
    """Draw the examples of a split, one entry a segment, in the order of the spec.

    Drawn on the CPU, so that a GPU sees the same numbers. Two splits share no random stream,
    and two epochs, of which each is another draw, none either.

    Raises:
        UsageError: a segment that the layout or the vocabulary has no room for.
    """
    segments = spec.train if split == "train" else spec.test
    return tuple(
        _segment(spec, segment, _generator(spec, segment, split, index, epoch), device)
        for index, segment in enumerate(segments)
    )


def check_segment(spec: MqarSpec, segment: Segment) -> str:
    """Say what is wrong with a segment; an empty string if nothing is."""
    if segment.pairs < 1 or segment.examples < 1:
        return f"a segment needs at least 1 pair and 1 example; found {segment}"
    if 4 * segment.pairs > segment.length:
        return (
            f"{segment.pairs} pairs and their queries need a length of at least "
            f"{4 * segment.pairs} tokens; found {segment.length}"
        )
    keys = spec.vocab_size // 2 - 1
    if segment.pairs > keys:
        return (
            f"{segment.pairs} pairs need {segment.pairs} different keys; "
            f"a vocabulary of {spec.vocab_size} has {keys}"
        )
    return ""


def last_query(spec: MqarSpec, segment: Segment) -> int:
    """The last position where a query may stand."""
    return spec.prefix_of(segment) + 2 * (_places(segment) - 1)


def _generator(
    spec: MqarSpec, segment: Segment, split: Split, index: int, epoch: int
) -> torch.Generator:
    layout = (segment.length, segment.pairs, spec.vocab_size, spec.power_a, spec.random_filler)
    text = json.dumps([*layout, spec.seed, split, index, *([epoch] if epoch else [])])
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _segment(
    spec: MqarSpec, segment: Segment, generator: torch.Generator, device: torch.device | str
) -> Examples:
    if problem := check_segment(spec, segment):
        raise UsageError(f"task: {problem}")
    half = spec.vocab_size // 2
    keys, values = _Deck(half - 1, generator), _Deck(spec.vocab_size - half, generator)
    chunks = []
    for start in range(0, segment.examples, _CHUNK_ROWS):
        rows = min(_CHUNK_ROWS, segment.examples - start)
        keys_RK = keys.draw(rows, segment.pairs) + 1
        values_RK = values.draw(rows, segment.pairs) + half
        at_RK = 2 * segment.pairs + 2 * _gaps(spec, segment, rows, generator)
        tokens_RL = _filler(spec, segment, rows, generator)
        tokens_RL[:, 0 : 2 * segment.pairs : 2] = keys_RK
        tokens_RL[:, 1 : 2 * segment.pairs : 2] = values_RK
        tokens_RL.scatter_(1, at_RK, keys_RK)
        first_RA = _put_first(spec, segment, tokens_RL, at_RK)
        tokens_RL = torch.cat((first_RA, tokens_RL), dim=1)
        chunks.append((tokens_RL, at_RK + first_RA.shape[1], values_RK))
    tokens, at, labels = (torch.cat(part).int().to(device) for part in zip(*chunks, strict=True))
    return Examples(segment.name, tokens, at, labels, spec.prefix_of(segment))


def _put_first(spec: MqarSpec, segment: Segment, tokens_RL: Tensor, at_RK: Tensor) -> Tensor:
    """What the prompt puts before the plain sequence, one row each."""
    if spec.prompt == "twice":
        return tokens_RL[:, : 2 * segment.pairs]
    if spec.prompt == "question_first":
        return tokens_RL.gather(1, at_RK.sort(dim=1).values)
    return tokens_RL[:, :0]


class _Deck:
    """Draws without replacement, for many rows at once: a partial Fisher-Yates shuffle.

    A shuffle is uniform from any starting order, so the decks of one chunk serve the next as they
    lie, and a draw costs O(pairs) and not O(cards) a row.
    """

    def __init__(self, cards: int, generator: torch.Generator) -> None:
        self.cards_CR = torch.arange(cards).unsqueeze(1).repeat(1, _CHUNK_ROWS)
        self.generator = generator

    def draw(self, rows: int, count: int) -> Tensor:
        """Return int64 [rows, count]; every row holds different cards in uniform order."""
        total = len(self.cards_CR)
        for top in range(count):
            other_R = torch.randint(top, total, (1, _CHUNK_ROWS), generator=self.generator)
            drawn_R = self.cards_CR.gather(0, other_R)
            self.cards_CR.scatter_(0, other_R, self.cards_CR[top : top + 1].clone())
            self.cards_CR[top] = drawn_R
        return self.cards_CR[:count, :rows].T.clone()


def _places(segment: Segment) -> int:
    """Places where a query may stand."""
    return (segment.length - 2 * segment.pairs) // 2


def _gaps(spec: MqarSpec, segment: Segment, rows: int, generator: torch.Generator) -> Tensor:
    """Draw one gap a pair, int64 [rows, K]: Gumbel top-k is drawing without replacement.

    In float64, so that a last-bit difference between CPUs cannot change an order in practice.
    """
    places = _places(segment)
    i = torch.arange(1, places + 1, dtype=torch.float64)
    uniform = torch.rand(rows, places, dtype=torch.float64, generator=generator)
    gumbel = -torch.log(-torch.log(uniform))
    return ((spec.power_a - 1) * torch.log(i) + gumbel).topk(segment.pairs, dim=1).indices


def _filler(spec: MqarSpec, segment: Segment, rows: int, generator: torch.Generator) -> Tensor:
    if not spec.random_filler:
        return torch.zeros(rows, segment.length, dtype=torch.int64)
    return torch.randint(0, spec.vocab_size, (rows, segment.length), generator=generator)
