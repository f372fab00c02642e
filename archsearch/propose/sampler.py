"""Optuna's samplers as a pure function: the same study, told the same, proposes the same.

The sampler works on an Optuna study in memory that holds exactly our trials, in our order. It is
made anew for every proposal with a seed of (study seed, trial number), so nothing depends on how
often a coordinator was restarted: `place` puts a stored trial back, with what the sampler noted at
the time. Knows neither the database nor Ray.
"""

import hashlib
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial, TrialState, create_trial

from archsearch.arch import ArchSpec
from archsearch.compose import compose
from archsearch.model_spec import ModelSpec
from archsearch.propose.evolution import Evolution
from archsearch.propose.told import Told, tell
from archsearch.space import Value
from archsearch.spec import StudySpec

EVOLUTION = "evolution"
"""The sampler that is ours, not Optuna's."""
_NAME = "proposals"
Notes = dict[str, dict[str, Any]]
"""Optuna's system attributes that a proposal set: on its `trial` and on the `study`. And as
`respelled` what the sampler had decided, if other decisions led to that architecture before."""


def resolve_sampler(spec: StudySpec) -> dict[str, Any]:
    """What a study's sampler setting means, fixed when the study begins.

    `auto` is evolution, which found the front soonest in `benchmarks/search_quality.py`. NSGA-II's
    population gives ten generations where the budget allows.
    """
    name = EVOLUTION if spec.search.sampler == "auto" else spec.search.sampler
    if name == "nsga2":
        return {"name": name, "population": max(8, min(50, spec.search.trials // 10))}
    return {"name": name}


def distribution_of(candidates: tuple[Value, ...]) -> BaseDistribution:
    """Optuna's distribution for candidates: evenly spaced rising integers, else a choice."""
    step = _step(candidates)
    if step is not None:
        return IntDistribution(int(candidates[0]), int(candidates[-1]), step=step)
    return CategoricalDistribution(candidates)


def _step(candidates: tuple[Value, ...]) -> int | None:
    if len(candidates) < 2 or any(type(value) is not int for value in candidates):
        return None
    numbers = [int(value) for value in candidates]
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    return steps.pop() if len(steps) == 1 and min(steps) > 0 else None


class Proposal:
    """An architecture, the decisions that lead to it, and what the sampler noted."""

    def __init__(self, arch: ArchSpec, params: dict[str, Value], notes: Notes) -> None:
        self.arch = arch
        self.params = params
        self.notes = notes


class Proposer:
    """Proposes the trials of one study, in order of number.

    Args:
        spec: the study.
        sampler: from `resolve_sampler`, as stored with the study.
    """

    def __init__(self, spec: StudySpec, sampler: Mapping[str, Any]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spec = spec
        self._sampler = dict(sampler)
        self._storage = InMemoryStorage()
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            sampler=RandomSampler(0),
            directions=[objective.direction for objective in spec.objectives],
        )
        self._study_id = self._storage.get_study_id_from_name(_NAME)
        self._numbers: list[int] = []
        """Optuna's number of each trial."""
        self._made = 0
        """Optuna's trials."""
        self._spellings: dict[str, dict[str, Value]] = {}
        """By architecture: the decisions that led to it first."""
        self._evolution = Evolution(spec) if sampler["name"] == EVOLUTION else None

    def ask(self) -> Proposal:
        """Propose the next trial; what was proposed before comes with the same decisions."""
        if self._evolution is not None:
            return self.take(self._evolution.propose(_seed(self._spec.seed, len(self._numbers))))
        return self._ask()

    def make_sampler(self, seed: int) -> BaseSampler:
        """Optuna's sampler for one proposal."""
        return _make_sampler(self._sampler, seed)

    def _ask(self) -> Proposal:
        self._study.sampler = self.make_sampler(_seed(self._spec.seed, len(self._numbers)))
        before = dict(self._storage.get_study_system_attrs(self._study_id))
        trial = self._study.ask()
        assert trial.number == self._made
        self._made += 1

        def choose(name: str, candidates: tuple[Value, ...]) -> Value:
            return _suggest(trial, name, candidates)

        arch = compose(self._spec.model, choose)
        after = self._storage.get_study_system_attrs(self._study_id)
        noted = self._storage.get_trial(
            self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)
        )
        new = {key: value for key, value in after.items() if before.get(key) != value}
        notes = {"trial": dict(noted.system_attrs), "study": new}
        params = dict(trial.params)
        first = self._spellings.get(arch.arch_hash, params)
        if first != params:  # a failed trial is what no sampler learns from
            tell(self._study, self._storage, self._study_id, trial.number, Told("fail"))
            self._place(first, notes)
            notes["respelled"] = params
        self._note(arch, first)
        return Proposal(arch, dict(first), notes)

    def take(self, params: Mapping[str, Value]) -> Proposal:
        """Propose an architecture that is not of the sampler's making."""
        self._study.enqueue_trial(dict(params))
        return self._ask()

    def place(self, params: Mapping[str, Value], notes: Notes) -> Proposal:
        """Put a stored trial back, as it was proposed."""
        arch = compose(self._spec.model, lambda name, _candidates: params[name])
        for key, value in notes.get("study", {}).items():
            self._storage.set_study_system_attr(self._study_id, key, value)
        if "respelled" in notes:
            self._place(notes["respelled"], {}, TrialState.FAIL)
        self._place(params, notes)
        self._note(arch, params)
        return Proposal(arch, dict(params), notes)

    def _place(
        self, params: Mapping[str, Value], notes: Notes, state: TrialState = TrialState.RUNNING
    ) -> None:
        distributions = distributions_of(self._spec.model, params)
        self._study.add_trial(
            create_trial(
                state=state,
                params={name: params[name] for name in distributions},
                distributions=distributions,
                system_attrs=notes.get("trial", {}),
            )
        )
        self._made += 1

    def _note(self, arch: ArchSpec, params: Mapping[str, Value]) -> None:
        self._numbers.append(self._made - 1)
        self._spellings.setdefault(arch.arch_hash, dict(params))
        if self._evolution is not None:
            self._evolution.add(arch, params)

    def tell(self, number: int, told: Told) -> None:
        """End a trial, so that later proposals learn from it."""
        if self._evolution is not None:
            self._evolution.tell(number, told)
        tell(self._study, self._storage, self._study_id, self._numbers[number], told)


def distributions_of(model: ModelSpec, params: Mapping[str, Value]) -> dict[str, BaseDistribution]:
    """Optuna's distribution of every decision that was asked for these values."""
    found: dict[str, BaseDistribution] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        found[name] = distribution_of(candidates)
        return params[name]

    compose(model, choose)
    return found


def _suggest(trial: Trial, name: str, candidates: tuple[Value, ...]) -> Value:
    distribution = distribution_of(candidates)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step)
    value = trial.suggest_categorical(name, candidates)
    assert value is not None
    return value


def _seed(study_seed: int, number: int) -> int:
    """A seed of 32 bits for one proposal."""
    digest = hashlib.sha256(f"{study_seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _make_sampler(sampler: Mapping[str, Any], seed: int) -> BaseSampler:
    name = sampler["name"]
    if name in ("random", EVOLUTION):  # what evolution proposes is given to it
        return RandomSampler(seed)
    if name == "gp":
        return GPSampler(seed=seed, warn_independent_sampling=False)
    if name == "nsga2":
        return NSGAIISampler(seed=seed, population_size=sampler["population"])
    assert name == "tpe", name
    with warnings.catch_warnings():
        # Groups keep the fields of each mixer apart; Optuna calls them experimental.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=True)
