"""Proposals: a function of the study and what was told, and what Optuna must be told how."""

import itertools
import json
import random
import subprocess
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from stub_trials import changed, pretended_recall, stub_study

from archsearch.arch import ArchSpec
from archsearch.compose import Assignment, compose, count, draw, walk
from archsearch.coordinator.book import Book, Entry
from archsearch.coordinator.nexts import STUCK_LARGE, Nexts
from archsearch.cost import state_bytes
from archsearch.errors import ServiceError, StudyRefusedError
from archsearch.gate import gate
from archsearch.model_spec import ModelSpec, Option, Slot
from archsearch.propose.corners import (
    SMALL,
    largest,
    neighbours,
    shuffled,
    warm_start,
)
from archsearch.propose.mirror import Mirror
from archsearch.propose.sampler import Proposal, Proposer, distribution_of, resolve_sampler
from archsearch.propose.told import Told, told_of
from archsearch.records import TrialState
from archsearch.registry import load_mixer
from archsearch.space import Value
from archsearch.spec import Limit, Objective, StudySpec
from archsearch.store.database import engine_options

HERE = Path("unused")
SPEC = stub_study(HERE)
SAMPLERS: list[dict[str, Any]] = [
    {"name": "random"},
    {"name": "tpe"},
    {"name": "gp"},
    {"name": "nsga2", "population": 8},
    {"name": "evolution"},
]
LAG = 3
"""Trials that are proposed and not yet told, as with three workers."""


def verdict(spec: StudySpec, arch: ArchSpec) -> Told:
    recall, size = pretended_recall(arch.arch_hash), state_bytes(arch, 32, torch.float32)
    signs = {"mixer_rules": 0.0, "limit0.state_bytes": size / 20_000 - 1}
    if size > 20_000:
        return Told("pruned", constraints=signs)
    return Told("complete", (recall, size), signs) if recall > 0.1 else Told("fail")


def hashes(found: list[Assignment]) -> set[str]:
    return {one.arch.arch_hash for one in found}


def search(spec: StudySpec, sampler: dict[str, Any], trials: int) -> list[Proposal]:
    """Ask and tell, `LAG` behind."""
    proposer, found = Proposer(spec, sampler), list[Proposal]()
    for number in range(trials):
        if number >= LAG:
            proposer.tell(number - LAG, verdict(spec, found[number - LAG].arch))
        given = number % 5 == 4  # as when a duplicate is followed by something new
        found.append(proposer.take(found[-1].params) if given else proposer.ask())
    return found


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler["name"])
def test_going_on_proposes_what_one_run_proposes(sampler: dict[str, Any]) -> None:
    """Stored trials, their notes gone through JSON, put a new proposer where the old one was."""
    # Past ten told trials every sampler uses its model; a Gaussian process takes its time.
    trials, cuts = (16, (15,)) if sampler["name"] == "gp" else (36, (1, 20, 33))
    whole = search(SPEC, sampler, trials)
    for cut in cuts:
        proposer = Proposer(SPEC, sampler)
        for old in json.loads(json.dumps([[one.params, one.notes] for one in whole[:cut]])):
            proposer.place(*old)
        for number in range(max(0, cut - LAG + 1)):
            proposer.tell(number, verdict(SPEC, whole[number].arch))
        for number in range(cut, trials):
            if number > cut and number >= LAG:
                proposer.tell(number - LAG, verdict(SPEC, whole[number - LAG].arch))
            given = number % 5 == 4
            one = proposer.take(whole[number - 1].params) if given else proposer.ask()
            assert one.arch == whole[number].arch, number


def spelled_twice() -> StudySpec:
    """A study of two layers that may be left out, so that one alone can be either of them."""
    fields: dict[str, tuple[Value, ...]] = {"window": (1, 4), "heads": (1, 2)}
    maybe = Slot(options=(Option(mixer="none"), Option(mixer="sliding_window", fields=fields)))
    model = ModelSpec(width=(8,), layers=(maybe, maybe))
    return SPEC.model_copy(update={"model": model, "limits": ()})


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler["name"])
def test_an_architecture_is_proposed_with_the_same_decisions_every_time(
    sampler: dict[str, Any],
) -> None:
    spec = spelled_twice()
    trials = 14 if sampler["name"] == "gp" else 40
    proposer, found = Proposer(spec, sampler), list[Proposal]()
    for number in range(trials):
        found.append(proposer.ask())
        size = float(state_bytes(found[-1].arch, 32, torch.float32))
        proposer.tell(number, Told("complete", (0.5, size), {"mixer_rules": 0.0}))
    spellings: dict[str, dict[str, Value]] = {}
    for one in found:
        assert spellings.setdefault(one.arch.arch_hash, one.params) == one.params
        assert draw_again(spec, one.params) == one.arch
    assert any("respelled" in one.notes for one in found)
    again = Proposer(spec, sampler)
    for number, old in enumerate(json.loads(json.dumps([[p.params, p.notes] for p in found[:-1]]))):
        assert again.place(*old).arch == found[number].arch
        size = float(state_bytes(found[number].arch, 32, torch.float32))
        again.tell(number, Told("complete", (0.5, size), {"mixer_rules": 0.0}))
    assert again.ask().arch == found[-1].arch


def draw_again(spec: StudySpec, params: Mapping[str, Value]) -> ArchSpec:
    return compose(spec.model, lambda name, _candidates: params[name])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler["name"])
@pytest.mark.parametrize("complete_every", [3, 100], ids=["some", "all"])
def test_every_sampler_goes_on_after_trials_that_were_stopped(
    sampler: dict[str, Any], complete_every: int
) -> None:
    """They end without values, which Optuna's samplers of several objectives once fell over."""
    proposer, kept = Proposer(SPEC, sampler), {"mixer_rules": 0.0, "limit0.state_bytes": -0.5}
    for number in range(40 if complete_every == 3 else 24):
        arch = proposer.ask().arch
        known = {"state_bytes": float(state_bytes(arch, 32, torch.float32))}
        stopped = told_of(SPEC, TrialState.STOPPED, False, known, kept)
        assert stopped == Told("pruned", None, kept)
        metrics = {**known, "recall": pretended_recall(arch.arch_hash)}
        complete = told_of(SPEC, TrialState.COMPLETE, False, metrics, kept)
        proposer.tell(number, complete if number % complete_every == 2 else stopped)


@pytest.mark.parametrize("name", ["tpe", "evolution"])
def test_a_model_turns_away_from_what_is_stopped(name: str) -> None:
    spec = SPEC.model_copy(update={"limits": ()})
    proposer = Proposer(spec, {"name": name})
    good = 0
    for number in range(60):
        arch = proposer.ask().arch
        is_good = arch.layers[0].mixer == "base_conv"
        values = (0.5, float(state_bytes(arch, 32, torch.float32)))
        kept = {"mixer_rules": 0.0}
        told = Told("complete", values, kept) if is_good else Told("pruned", None, kept)
        proposer.tell(number, told)
        good += is_good and number >= 30
    assert good >= 20  # of 30; chance gives 15


@pytest.mark.parametrize("name", ["tpe", "evolution"])
def test_proposals_do_not_depend_on_the_process(name: str) -> None:
    """Python's string hashes differ between processes; nothing may depend on them."""
    program = (
        "import test_propose as t\n"
        f"print(*[p.arch.arch_hash for p in t.search(t.SPEC, {{'name': '{name}'}}, 24)])\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [one.arch.arch_hash for one in search(SPEC, {"name": name}, 24)]
    assert elsewhere.stdout.split() == here


def test_another_seed_searches_otherwise() -> None:
    other = SPEC.model_copy(update={"seed": 8})
    first, second = search(SPEC, {"name": "random"}, 8), search(other, {"name": "random"}, 8)
    assert [one.arch for one in first] != [one.arch for one in second]


def test_tpe_learns_from_what_it_is_told() -> None:
    """One mixer is told to be far better; after a while it is proposed most of the time."""
    spec = changed(SPEC, "search", sampler="tpe").model_copy(
        update={"objectives": SPEC.objectives[:1], "limits": ()}
    )
    proposer = Proposer(spec, {"name": "tpe"})
    good = 0
    for number in range(60):
        arch = proposer.ask().arch
        is_good = arch.layers[0].mixer == "base_conv"
        proposer.tell(number, Told("complete", (1.0 if is_good else 0.0,), {"mixer_rules": 0.0}))
        good += is_good and number >= 30
    assert good >= 20  # of 30; chance gives 15


def test_tpe_turns_away_from_broken_constraints() -> None:
    spec = SPEC.model_copy(update={"objectives": SPEC.objectives[:1]})
    proposer = Proposer(spec, {"name": "tpe"})
    broken = 0
    for number in range(60):
        arch = proposer.ask().arch
        is_broken = arch.layers[0].mixer == "base_conv"
        signs = {"mixer_rules": 0.0, "limit0.state_bytes": 1.0 if is_broken else -1.0}
        told = Told("pruned", None, signs) if is_broken else Told("complete", (0.5,), signs)
        proposer.tell(number, told)
        broken += is_broken and number >= 30
    assert broken <= 10  # of 30; chance gives 15


def test_making_a_sampler_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sampler in SAMPLERS:
            Proposer(SPEC, sampler).ask()


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ((8, 16, 24), optuna.distributions.IntDistribution(8, 24, step=8)),
        ((1, 2), optuna.distributions.IntDistribution(1, 2)),
        ((16, 64, 256), optuna.distributions.CategoricalDistribution((16, 64, 256))),
        ((24, 16, 8), optuna.distributions.CategoricalDistribution((24, 16, 8))),
        ((False, True), optuna.distributions.CategoricalDistribution((False, True))),
        ((1.0, 2.0), optuna.distributions.CategoricalDistribution((1.0, 2.0))),
        (("a", "b"), optuna.distributions.CategoricalDistribution(("a", "b"))),
    ],
)
def test_only_evenly_spaced_integers_are_numbers(
    candidates: tuple[Any, ...], expected: optuna.distributions.BaseDistribution
) -> None:
    assert distribution_of(candidates) == expected


def test_samplers_are_fixed_when_a_study_begins() -> None:
    assert resolve_sampler(changed(SPEC, "search", sampler="auto")) == {"name": "evolution"}
    assert resolve_sampler(changed(SPEC, "search", sampler="random")) == {"name": "random"}
    many = changed(SPEC, "search", sampler="nsga2", trials=2000)
    assert resolve_sampler(many) == {"name": "nsga2", "population": 50}


def test_decisions_of_the_walk_lead_back_to_their_architectures() -> None:
    proposer = Proposer(SPEC, {"name": "random"})
    for one in list(walk(SPEC.model))[::7]:
        assert proposer.take(one.params).arch == one.arch


def test_shuffled_is_the_whole_space_in_the_seed_order() -> None:
    other = SPEC.model_copy(update={"seed": 8})
    first, second = shuffled(SPEC), shuffled(other)
    assert [one.arch for one in first] != [one.arch for one in second]
    assert hashes(first) == hashes(second)
    assert [one.arch for one in shuffled(SPEC)] == [one.arch for one in first]


def test_warm_start_is_the_corners_of_what_is_feasible() -> None:
    spec = changed(SPEC, "search", warm_start=("smallest", "middle", "largest"))
    spec = spec.model_copy(update={"limits": (Limit(metric="state_bytes", maximum=20_000),)})

    def size(arch: ArchSpec) -> int:
        return state_bytes(arch, spec.task.longest, torch.float32)

    feasible = sorted(size(one.arch) for one in walk(spec.model) if gate(one.arch, spec).is_open)
    smallest, middle, biggest = (size(one.arch) for one in warm_start(spec))
    assert smallest == feasible[0]
    assert biggest == feasible[-1] <= 20_000
    assert feasible[0] < middle < feasible[-1]


def test_warm_start_of_a_space_without_anything_feasible_is_empty() -> None:
    spec = changed(SPEC, "search", warm_start=("smallest",))
    spec = spec.model_copy(update={"limits": (Limit(metric="state_bytes", maximum=1),)})
    assert warm_start(spec) == []


def test_largest_is_of_the_whole_space() -> None:
    sizes = [gate(one.arch, SPEC).metrics["state_bytes"] for one in walk(SPEC.model)]
    assert largest(SPEC) == {"state_bytes": max(sizes)}


def test_largest_leaves_out_what_a_mixer_fails_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = Objective(metric="flops_per_token", direction="minimize")
    spec = SPEC.model_copy(update={"objectives": (flops,), "limits": ()})
    monkeypatch.setattr(load_mixer("sliding_window").Config, "flops", lambda *_: float("nan"))
    gates = [gate(one.arch, spec) for one in walk(spec.model)]
    sizes = [one.metrics["flops_per_token"] for one in gates if one.is_open]
    assert 0 < len(sizes) < len(gates)
    assert largest(spec) == {"flops_per_token": max(sizes)}


@pytest.mark.parametrize(
    "told",
    [
        Told("complete", (float("nan"), 1.0)),
        Told("complete", (float("inf"), 1.0)),
        Told("complete", (1.0,)),
        Told("complete"),
        Told("fail", (1.0, 1.0)),
        Told("complete", (1.0, 1.0), {"limit": float("nan")}),
    ],
)
def test_what_optuna_would_swallow_is_never_told(told: Told) -> None:
    proposer = Proposer(SPEC, {"name": "random"})
    proposer.ask()
    with pytest.raises(AssertionError):
        proposer.tell(0, told)
    proposer.tell(0, Told("fail"))  # still open: nothing half told is left behind


def open_mirror(spec: StudySpec) -> Mirror:
    return Mirror(spec, spec.tracking.storage, engine_options(spec.tracking.storage))


def test_mirror_shows_trials_in_optunas_own_tables(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    mirror = open_mirror(spec)
    proposals = search(spec, {"name": "random"}, 4)
    numbers = [mirror.add(one.params, {"archsearch_trial": i}) for i, one in enumerate(proposals)]
    signs = {"mixer_rules": 0.0, "limit0.state_bytes": 0.5}
    mirror.tell(numbers[0], Told("complete", (0.5, 100.0), {**signs, "limit0.state_bytes": -1.0}))
    mirror.tell(numbers[1], Told("pruned", constraints=signs), "too large")
    mirror.tell(numbers[2], Told("fail"), "lost")
    assert mirror.running() == {numbers[3]}
    mirror.close()

    study = optuna.load_study(study_name="stub", storage=spec.tracking.storage)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "RUNNING"]
    assert study.trials[0].values == [0.5, 100.0]
    assert study.trials[1].constraints == signs
    assert study.trials[2].user_attrs["archsearch_reason"] == "lost"
    assert [trial.params for trial in study.trials] == [one.params for one in proposals]
    assert [trial.number for trial in study.best_trials] == [0]
    assert study.metric_names == ["recall", "state_bytes"]


def test_mirror_keeps_off_a_study_it_did_not_make(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    theirs = optuna.create_study(study_name="stub", storage=spec.tracking.storage)
    theirs.tell(theirs.ask(), 1.0)
    with pytest.raises(StudyRefusedError, match="Optuna already has a study 'stub'"):
        open_mirror(spec)


def test_first_starts_at_once_share_optunas_tables(tmp_path: Path) -> None:
    def start(number: int) -> list[str]:
        mirror = open_mirror(stub_study(tmp_path, name=f"stub{number}"))
        mirror.close()
        return optuna.get_all_study_names(stub_study(tmp_path).tracking.storage)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(start, range(4)))
    assert sorted(max(found, key=len)) == [f"stub{number}" for number in range(4)]


def test_mirror_says_when_its_tables_cannot_be_opened(tmp_path: Path) -> None:
    spec = stub_study(tmp_path / "missing")
    with pytest.raises(ServiceError, match="Optuna's tables cannot be opened"):
        open_mirror(spec)


def test_neighbours_change_one_decision_then_more() -> None:
    start = draw(SPEC.model, random.Random(3))
    near = list(itertools.islice(neighbours(SPEC.model, start.params, random.Random(0)), 60))

    def changes(one: Assignment) -> int:
        both = start.params.keys() & one.params.keys()
        return sum(start.params[name] != one.params[name] for name in both)

    assert {changes(one) for one in near[:20]} == {1}
    assert max(changes(one) for one in near) > 1
    assert all(one.arch.arch_hash != start.arch.arch_hash for one in near)
    proposer = Proposer(SPEC, {"name": "random"})
    assert all(proposer.take(one.params).arch == one.arch for one in near)


def test_a_large_space_without_anything_new_ends_after_a_hundred_trials() -> None:
    """Nothing is feasible here, and the space is too large to look through."""
    option = Option(mixer="sliding_window", fields={"window": tuple(range(1, 120))})
    model = ModelSpec(width=(32,), layers=(Slot(options=(option,)), Slot(options=(option,))))
    limits = (Limit(metric="state_bytes", maximum=1),)
    spec = SPEC.model_copy(update={"model": model, "limits": limits})
    book, proposer = Book(), Proposer(spec, {"name": "random"})
    nexts = Nexts(spec, proposer, book)
    while (one := nexts.next()) is not None:
        book.add(Entry(len(book), one.arch, one.params, TrialState.INFEASIBLE, {}))
    assert count(model) > SMALL
    assert len(book) == STUCK_LARGE
