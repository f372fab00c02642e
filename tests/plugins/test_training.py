"""Every installed mixer learns: trained on the recipe `tiny`, it recalls far more than by chance.

A mixer that carries information from token to token stands behind a short convolution, which lets
it see a key and its value together; those that look one or two tokens far are tried with attention.
"""

import pytest
import torch

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.model import resolve_backends
from archsearch.mqar import generate
from archsearch.population import Population, members_of
from archsearch.recipes import RECIPES
from archsearch.registry import mixer_names
from archsearch.spec import TrainSpec

TINY = RECIPES["tiny"]
SEGMENT = "L32K4"
BY_CHANCE = 1 / 32
"""Recall of a model that answers any of the 32 values."""

MEMORYLESS = 4 * BY_CHANCE
"""More than what short convolutions alone reach, by guessing keys next to their queries."""
LOCAL = {
    "base_conv": ("base_conv", "attention"),
    "mlp": ("base_conv", "attention", "mlp"),
    "rwkv_channel": ("base_conv", "attention", "rwkv_channel"),
    "swiglu": ("base_conv", "attention", "swiglu"),
}
"""Mixers that see one or two tokens -> the layers they are tried in."""


def recall_of(*mixers: str, train: TrainSpec) -> float:
    arch = ArchSpec(width=32, layers=tuple(LayerSpec(mixer=mixer, fields={}) for mixer in mixers))
    population = Population(
        arch,
        TINY.task.vocab_size,
        members_of(train),
        train,
        seed=0,
        backends=resolve_backends(arch, "cpu", torch.float32),
    )
    selection = generate(TINY.task, "selection", "cpu")
    rungs = list(population.train(generate(TINY.task, "train", "cpu"), selection))
    assert rungs
    return max(member[SEGMENT] for member in population.recall(selection))


@pytest.mark.parametrize("mixer", mixer_names())
def test_every_mixer_learns_to_recall(mixer: str) -> None:
    train = TINY.train.model_copy(
        update={"learning_rates": (1e-2,), "seeds": 1, "epochs": 2, "rungs": 1}
    )
    recall = recall_of(*LOCAL.get(mixer, ("base_conv", mixer)), train=train)
    assert recall > MEMORYLESS, f"{recall:.3f}"


def test_what_cannot_carry_a_value_does_not_pass() -> None:
    """The bar is above what a model without memory reaches."""
    train = TINY.train.model_copy(
        update={"learning_rates": (1e-2,), "seeds": 1, "epochs": 2, "rungs": 1}
    )
    assert recall_of("base_conv", "base_conv", train=train) < MEMORYLESS
