"""Members of a population: which copies of a model are trained, and where each begins.

Knows nothing of how they are trained.
"""

import hashlib
from dataclasses import dataclass

import torch

from archsearch.arch import ArchSpec
from archsearch.model import LanguageModel
from archsearch.spec import TrainSpec


@dataclass(frozen=True)
class Member:
    """One copy. Members of one seed share initialisation and dropout at every learning rate."""

    learning_rate: float
    seed: int


def members_of(train: TrainSpec) -> tuple[Member, ...]:
    """Every learning rate with every seed, seeds varying fastest."""
    return tuple(Member(rate, seed) for rate in train.learning_rates for seed in range(train.seeds))


def number_of(*parts: object) -> int:
    """A 63-bit seed that depends on the parts alone."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def dropout_seed(seed: int, member_seed: int) -> int:
    """What a member's dropout masks are drawn from; the step is added to it."""
    return number_of("dropout", seed, member_seed)


def initial_model(
    arch: ArchSpec, vocab_size: int, train: TrainSpec, seed: int, member_seed: int
) -> LanguageModel:
    """Build the model that a member starts from, on the CPU; leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number_of("init", seed, member_seed))
        return LanguageModel(arch, vocab_size, train.embed_dropout)
