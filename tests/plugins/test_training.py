"""Every installed mixer learns to recall: more than any answer from the values seen would score.

A mixer that carries information from token to token stands behind a short convolution, which lets
it see a key and its value together; those that look one or two tokens far are tried with attention.
"""

import pytest
import torch

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.members import members_of
from archsearch.model import resolve_backends
from archsearch.mqar import generate
from archsearch.population import Population
from archsearch.recipes import RECIPES
from archsearch.registry import mixer_names
from archsearch.spec import Segment

TINY = RECIPES["tiny"]
SEGMENT = "L32K4"
"""Four pairs, 256 examples: 1024 queries."""

WITHOUT_KEYS = 0.31
"""The best score of a model that knows all four values and does not look at the key that is asked.

Any value seen scores 1/4. Places are drawn one after the other, near ones more often, so that the
order of the queries says a little about which pair is asked: a test holds this number.
"""

RECALLS = 0.4
"""Beyond that by six standard errors of 1024 answers, sqrt(0.31 * 0.69 / 1024) = 0.0145 each."""

TRAIN = TINY.train.model_copy(update={"learning_rates": (1e-2,), "seeds": 1, "rungs": 1})
LOCAL = {
    "base_conv": ("base_conv", "attention"),
    "mlp": ("base_conv", "attention", "mlp"),
    "rwkv_channel": ("base_conv", "attention", "rwkv_channel"),
    "swiglu": ("base_conv", "attention", "swiglu"),
}
"""Mixers that see one or two tokens -> the layers they are tried in."""


def recall_of(*mixers: str) -> float:
    arch = ArchSpec(width=32, layers=tuple(LayerSpec(mixer=mixer, fields={}) for mixer in mixers))
    population = Population(
        arch,
        TINY.task.vocab_size,
        members_of(TRAIN),
        TRAIN,
        seed=0,
        backends=resolve_backends(arch, "cpu", torch.float32),
    )
    selection = generate(TINY.task, "selection", "cpu")
    rungs = list(population.train(generate(TINY.task, "train", "cpu"), selection))
    assert rungs
    return max(member[SEGMENT] for member in population.recall(selection))


@pytest.mark.parametrize("mixer", mixer_names())
def test_every_mixer_learns_to_recall(mixer: str) -> None:
    recall = recall_of(*LOCAL.get(mixer, ("base_conv", mixer)))
    assert recall > RECALLS, f"{recall:.3f}"


def test_what_cannot_carry_a_value_does_not_pass() -> None:
    assert recall_of("base_conv", "base_conv") < RECALLS


def test_the_order_of_queries_tells_little_of_the_key() -> None:
    """For each place and rank of a query, answer the pair that is asked there most often."""
    segment = Segment(length=32, pairs=4, examples=20_000)
    task = TINY.task.model_copy(update={"test": (segment,)})
    (examples,) = generate(task, "selection", "cpu")
    rank_NK = examples.at.argsort(1).argsort(1)
    answer_NK = examples.at * segment.pairs + rank_NK
    asked_AK = torch.stack([column_N.bincount(minlength=4 * 32) for column_N in answer_NK.T], dim=1)
    best = float(asked_AK.amax(1).sum() / asked_AK.sum())
    # Some 0.002 is luck: the most frequent of four counts, at 50 places and ranks.
    assert best == pytest.approx(WITHOUT_KEYS, abs=0.01)
