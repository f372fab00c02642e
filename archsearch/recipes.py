"""Named recipes: a task and how to train on it, under one name.

A study names a recipe (`mqar: tiny`) and may override any part of it. The numbers live here only.
Knows nothing of YAML, models or devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from archsearch.spec import MqarSpec, Segment, TrainSpec


@dataclass(frozen=True)
class Recipe:
    """A task, its training, and one sentence that says where the numbers come from."""

    doc: str
    task: MqarSpec
    train: TrainSpec


_FIGURE_2 = Recipe(
    doc=(
        "The memory-recall trade-off of Arora et al., 'Based' (arXiv:2402.18668), figure 2, as in "
        "the configuration its authors published; one seed, as there."
    ),
    task=MqarSpec(
        recipe="zoology-figure2",
        vocab_size=8192,
        train=(
            Segment(length=64, pairs=4, examples=100_000),
            Segment(length=128, pairs=8, examples=20_000),
            Segment(length=256, pairs=16, examples=20_000),
            Segment(length=256, pairs=32, examples=20_000),
            Segment(length=256, pairs=64, examples=20_000),
        ),
        test=(
            Segment(length=64, pairs=4, examples=1000),
            Segment(length=64, pairs=8, examples=1000),
            Segment(length=64, pairs=16, examples=1000),
            Segment(length=128, pairs=32, examples=1000),
            Segment(length=256, pairs=64, examples=1000),
            Segment(length=512, pairs=128, examples=1000),
            Segment(length=1024, pairs=256, examples=1000),
        ),
        power_a=0.01,
        random_filler=True,
    ),
    train=TrainSpec(
        # Four rates, evenly spaced in the logarithm from 1e-3 to 10 ** -1.5.
        learning_rates=tuple(10 ** (-3 + i / 2) for i in range(4)),
        seeds=1,
        epochs=32,
        batch_size=256,
        test_batch_size=32,
        weight_decay=0.1,
        betas=(0.9, 0.999),
        grad_clip=None,
        schedule="cosine_per_epoch",
        warmup_steps=0,
        embed_dropout=0.1,
        precision="fp32",
        rungs=8,
    ),
)

_TINY = Recipe(
    doc=(
        "Small enough for one CPU core: a vocabulary of 64, trained on 2, 4 and 8 pairs in 32 "
        "tokens, tested on up to 16 pairs in 64."
    ),
    task=MqarSpec(
        recipe="tiny",
        vocab_size=64,
        train=(
            Segment(length=32, pairs=2, examples=1024),
            Segment(length=32, pairs=4, examples=1024),
            Segment(length=32, pairs=8, examples=2048),
        ),
        test=(
            Segment(length=32, pairs=4, examples=256),
            Segment(length=32, pairs=8, examples=256),
            Segment(length=64, pairs=16, examples=128),
        ),
        # With so few tokens a random filler would often repeat a key and make a query ambiguous.
        random_filler=False,
    ),
    train=TrainSpec(
        learning_rates=(1e-2, 2e-2),
        seeds=2,
        epochs=3,
        batch_size=32,
        test_batch_size=128,
        betas=(0.9, 0.98),
        schedule="cosine_per_step",
        rungs=3,
    ),
)

RECIPES: Mapping[str, Recipe] = {recipe.task.recipe: recipe for recipe in (_TINY, _FIGURE_2)}
"""Every recipe by name."""

CUSTOM = "custom"
"""Name of a task that no recipe describes."""
