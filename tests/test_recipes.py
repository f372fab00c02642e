"""Named recipes: the published one to the letter, and room for every pair."""

import math

import pytest

from archsearch.mqar import check_segment
from archsearch.recipes import CUSTOM, RECIPES


def test_zoology_figure2_is_the_published_recipe() -> None:
    task, train = RECIPES["zoology-figure2"].task, RECIPES["zoology-figure2"].train
    assert task.vocab_size == 8192
    assert [(s.length, s.pairs, s.examples) for s in task.train] == [
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    ]
    assert [(s.length, s.pairs) for s in task.test] == [
        (64, 4),
        (64, 8),
        (64, 16),
        (128, 32),
        (256, 64),
        (512, 128),
        (1024, 256),
    ]
    assert {s.examples for s in task.test} == {1000}
    assert (task.power_a, task.random_filler) == (0.01, True)
    steps = sum(math.ceil(s.examples / train.batch_size) for s in task.train)
    assert (steps, train.epochs) == (707, 32)
    # numpy.logspace(-3, -1.5, 4), to the digits that the authors print.
    rates = [f"{rate:.2e}" for rate in train.learning_rates]
    assert rates == ["1.00e-03", "3.16e-03", "1.00e-02", "3.16e-02"]
    assert (train.batch_size, train.test_batch_size, train.seeds) == (256, 32, 1)
    assert (train.weight_decay, train.betas) == (0.1, (0.9, 0.999))
    assert (train.schedule, train.warmup_steps) == ("cosine_per_epoch", 0)
    assert (train.grad_clip, train.embed_dropout, train.precision) == (None, 0.1, "fp32")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_room_for_its_pairs_and_says_what_it_is(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.task.recipe == name != CUSTOM
    assert recipe.doc.endswith(".")
    said = [check_segment(recipe.task, s) for s in (*recipe.task.train, *recipe.task.test)]
    assert not any(said), said


def test_the_tiny_recipe_is_tiny() -> None:
    task = RECIPES["tiny"].task
    assert sum(segment.length * segment.examples for segment in task.train) < 2_000_000
    assert task.longest <= 128
