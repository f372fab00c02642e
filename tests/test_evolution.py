"""Evolution: what it may propose, what it learns from, and the arithmetic that it picks by."""

import math
import random
from typing import Any

import pytest
import torch
from stub_trials import pretended_recall, stub_study
from test_propose import HERE, LAG, search

from archsearch.arch import ArchSpec
from archsearch.compose import count, draw, walk
from archsearch.coordinator.book import Book, Entry
from archsearch.coordinator.nexts import Nexts
from archsearch.cost import state_bytes
from archsearch.gate import is_excluded
from archsearch.model_spec import Block, ChannelOption, ModelSpec, Option, Ratio, Share, Slot
from archsearch.pareto import hypervolume
from archsearch.propose import evolution
from archsearch.propose.breeding import child_of
from archsearch.propose.gain import Axis, chance_below, expected_gain
from archsearch.propose.sampler import Proposer
from archsearch.propose.surrogate import Surrogate, features
from archsearch.propose.told import Told
from archsearch.records import TrialState
from archsearch.registry import load_mixer
from archsearch.space import Value
from archsearch.spec import Limit, StudySpec

SPEC = stub_study(HERE)
SAMPLER: dict[str, Any] = {"name": "evolution"}

WINDOW = Option(mixer="sliding_window", fields={"window": (4, 8, 16), "heads": (1, 2)})
CONV = Option(mixer="base_conv", fields={"kernel": (2, 3)})
LINEAR = Option(mixer="linear_attention", fields={"feature_dim": (8, 16)})
EITHER = Slot(options=(CONV, WINDOW))
TIED = Slot(options=(CONV, WINDOW), tie="ends")
PARALLEL = Option(
    mixer="parallel",
    fields={"merge": ("mean", "weights")},
    parts=(Slot(options=(WINDOW,)), Slot(options=(LINEAR, CONV))),
)
SPACES = {
    "slots": ModelSpec(
        width=(8, 16),
        layers=(EITHER, Slot(options=(LINEAR, Option(mixer="none")))),
        channel_mixer=(ChannelOption(), ChannelOption(kind="swiglu", ratio=(2.0, 4.0))),
    ),
    "repeat": ModelSpec(
        width=(8,), layers=(Block(repeat=(1, 2), layers=(EITHER,), untied=("kernel", "mixer")),)
    ),
    "ratio": ModelSpec(
        width=(8,),
        layers=(
            Ratio(
                of=(2, 4),
                mix=(Share(layer=EITHER, share=(0.25, 0.5), place=("early", "late", "spread")),),
                rest=Slot(options=(LINEAR,)),
                untied=("feature_dim",),
            ),
        ),
    ),
    "tie": ModelSpec(width=(8,), layers=(TIED, EITHER, TIED)),
    "parts": ModelSpec(width=(16,), layers=(EITHER, Slot(options=(PARALLEL, LINEAR)))),
}


def told_of(spec: StudySpec, arch: ArchSpec) -> Told:
    size = float(state_bytes(arch, spec.task.longest, torch.float32))
    return Told("complete", (pretended_recall(arch.arch_hash), size), {"mixer_rules": 0.0})


@pytest.mark.parametrize("space", SPACES)
def test_proposals_are_new_architectures_of_the_space(space: str) -> None:
    spec = SPEC.model_copy(update={"model": SPACES[space], "limits": ()})
    walked = {one.arch.arch_hash for one in walk(spec.model)}
    proposer = Proposer(spec, SAMPLER)
    found: list[ArchSpec] = []
    for number in range(min(40, len(walked) * 2 // 3)):
        if number >= LAG:
            proposer.tell(number - LAG, told_of(spec, found[number - LAG]))
        one = proposer.ask()
        assert Proposer(spec, SAMPLER).take(one.params).arch == one.arch
        found.append(one.arch)
    hashes = [arch.arch_hash for arch in found]
    assert set(hashes) <= walked
    assert len(set(hashes)) == len(hashes)


def test_a_small_space_is_exhausted_without_a_duplicate_but_the_last() -> None:
    spec = SPEC.model_copy(update={"model": SPACES["repeat"], "limits": ()})
    book, proposer = Book(), Proposer(spec, SAMPLER)
    nexts = Nexts(spec, proposer, book)
    while (one := nexts.next()) is not None:
        leader = book.first_of(one.arch)
        entry = Entry(len(book), one.arch, one.params, TrialState.COMPLETE, {}, duplicate_of=leader)
        book.add(entry)
        proposer.tell(entry.number, told_of(spec, one.arch))
    assert book.work == len(list(walk(spec.model)))
    assert len(book) - book.work <= 5


def test_what_a_limit_excludes_is_not_proposed() -> None:
    spec = SPEC.model_copy(update={"limits": (Limit(metric="state_bytes", maximum=6_000),)})
    archs = [one.arch for one in walk(spec.model)]
    allowed = {arch.arch_hash for arch in archs if not is_excluded(arch, spec)}
    assert 20 < len(allowed) < count(spec.model) / 2
    proposals = search(spec, SAMPLER, 20)
    asked = [one.arch.arch_hash for number, one in enumerate(proposals) if number % 5 != 4]
    assert set(asked) <= allowed


def test_what_is_kept_of_architectures_changes_no_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that goes on has looked at fewer architectures than one that never ended."""
    whole = search(SPEC, SAMPLER, 24)
    monkeypatch.setattr(evolution, "_REMEMBERED", 3)
    assert [one.params for one in search(SPEC, SAMPLER, 24)] == [one.params for one in whole]


def test_running_trials_are_not_proposed_again() -> None:
    """Nothing is told for a while, as with many workers."""
    proposer = Proposer(SPEC, SAMPLER)
    first = [proposer.ask().arch for _ in range(6)]
    for number, arch in enumerate(first):
        proposer.tell(number, told_of(SPEC, arch))
    later = [proposer.ask().arch.arch_hash for _ in range(24)]
    assert len({*later, *(arch.arch_hash for arch in first)}) == 30


def test_it_turns_to_what_a_measured_limit_allows() -> None:
    """One mixer is too slow, which no one knows before; nothing else tells architectures apart."""
    limit = Limit(metric="decode_ms", maximum=1.0)
    spec = SPEC.model_copy(update={"limits": (limit,), "objectives": SPEC.objectives[:1]})
    proposer, slow = Proposer(spec, SAMPLER), 0
    for number in range(40):
        arch = proposer.ask().arch
        is_slow = arch.layers[0].mixer == "sliding_window"
        signs = {"mixer_rules": 0.0, "limit0.decode_ms": 1.0 if is_slow else -0.5}
        proposer.tell(number, Told("complete", (pretended_recall(arch.arch_hash),), signs))
        slow += is_slow and number >= 10
    assert slow <= 5  # of 30; chance gives 20


@pytest.mark.parametrize(
    "end",
    [
        Told("fail"),
        Told("pruned", None, {"mixer_rules": 0.0}),
        Told("pruned", None, {"mixer_rules": 1.0}),
    ],
    ids=["failed", "stopped", "excluded"],
)
def test_it_turns_away_from_what_ends_without_values(end: Told) -> None:
    spec = SPEC.model_copy(update={"limits": ()})
    proposer, bad = Proposer(spec, SAMPLER), 0
    for number in range(40):
        arch = proposer.ask().arch
        is_bad = arch.layers[0].mixer == "sliding_window"
        proposer.tell(number, end if is_bad else told_of(spec, arch))
        bad += is_bad and number >= 10
    assert bad <= 5  # of 30; chance gives 20


def test_a_mixer_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_mixer("sliding_window").Config, "state_spec", _fail)
    proposer = Proposer(SPEC, SAMPLER)
    for number in range(12):
        arch = proposer.ask().arch
        assert "sliding_window" not in arch.mixers
        proposer.tell(number, told_of(SPEC, arch))
    proposer.take(
        {
            "width": 32,
            "layer0.mixer": "sliding_window",
            "layer0.sliding_window.window": 4,
            "layer1.mixer": "linear_attention",
            "layer1.linear_attention.feature_dim": 8,
        }
    )
    proposer.tell(12, Told("fail"))
    assert "sliding_window" not in proposer.ask().arch.mixers


def _fail(*_: Any) -> None:
    raise RuntimeError("planted")


def test_ends_of_known_axes_and_middle_of_recall_are_found_soon() -> None:
    """Recall rises with the state here; the front is every size that is best in something."""
    spec = SPEC.model_copy(update={"limits": ()})

    def point(arch: ArchSpec) -> tuple[float, float]:
        size = float(state_bytes(arch, spec.task.longest, torch.float32))
        good = 0.05 * (arch.layers[0].mixer == "base_conv") - 0.05 * (arch.width == 64)
        return min(1.0, math.log10(size) / 6 + good), size

    def share(archs: list[ArchSpec]) -> float:
        points = [(1 - recall, math.log10(size) / 6) for recall, size in map(point, archs)]
        return hypervolume(points, (1.0, 1.0))

    best = share([one.arch for one in walk(spec.model)])

    def reached(name: str, seed: int) -> float:
        proposer, found = Proposer(spec.model_copy(update={"seed": seed}), {"name": name}), []
        for number in range(25):
            found.append(proposer.ask().arch)
            proposer.tell(number, Told("complete", point(found[-1]), {"mixer_rules": 0.0}))
        return share(found) / best

    ours, theirs = ([reached(name, seed) for seed in range(3)] for name in ("evolution", "random"))
    assert min(ours) > max(theirs)
    assert min(ours) > 0.98


@pytest.mark.parametrize("space", SPACES)
def test_children_are_of_the_space_and_near_a_parent(space: str) -> None:
    model, rng = SPACES[space], random.Random(0)
    walked = {one.arch.arch_hash for one in walk(model)}
    for _ in range(100):
        parents = [draw(model, rng) for _ in range(rng.choice((1, 2)))]
        child = child_of(model, [one.params for one in parents], rng)
        assert child.arch.arch_hash in walked
        if len(parents) == 1:
            mixers = sorted(child.arch.mixers), sorted(parents[0].arch.mixers)
            assert len(set(mixers[0]) ^ set(mixers[1])) <= 4


def test_a_child_can_be_its_parent_with_two_layers_swapped() -> None:
    model = ModelSpec(width=(8,), layers=(EITHER, EITHER))
    parent: dict[str, Value] = {
        "layer0.mixer": "base_conv",
        "layer0.base_conv.kernel": 3,
        "layer1.mixer": "sliding_window",
        "layer1.sliding_window.window": 16,
        "layer1.sliding_window.heads": 2,
    }
    rng = random.Random(0)
    children = [child_of(model, [parent], rng).params for _ in range(60)]
    other = {"layer0": "layer1", "layer1": "layer0"}
    assert {other[name[:6]] + name[6:]: value for name, value in parent.items()} in children


def test_gain_of_known_costs_is_the_gain_in_hypervolume() -> None:
    front = [(0.2, 0.7), (0.6, 0.3)]
    asked = [(0.4, 0.4), (0.1, 0.9), (0.7, 0.8), (0.2, 0.1)]
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*asked, strict=True)]
    axes = [Axis(0.0, 1.0, column, None) for column in columns]
    gain = expected_gain(axes, front, seed=0)
    before = hypervolume(front, (1.0, 1.0))
    exact = [hypervolume([*front, one], (1.0, 1.0)) - before for one in asked]
    # A scrambled Sobol sequence of S points in two dimensions misses areas by about log(S)^2/S.
    assert gain.tolist() == pytest.approx(exact, abs=math.log(1024) ** 2 / 1024)
    assert gain[2] == 0


def test_gain_of_an_uncertain_cost_is_the_expected_improvement() -> None:
    mean, deviation, best = 0.5, 0.1, 0.45
    axis = Axis(0.0, 1.0, torch.tensor([mean]).double(), torch.tensor([deviation]).double())
    z = (best - mean) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = float(chance_below(best, axis.mean, torch.tensor([deviation]).double()))
    expected = (best - mean) * below + deviation * density
    # One dimension of the sequence has one point in each 1024th, so a monotone integrand is off
    # by less than that.
    assert float(expected_gain([axis], [(best,)], seed=0)) == pytest.approx(expected, abs=1 / 1024)


def test_the_surrogate_knows_what_it_was_told_and_little_else() -> None:
    archs = [one.arch for one in walk(SPEC.model)]
    rows = [features(arch, {}) for arch in archs]
    targets = [arch.layers[0].mixer == "base_conv" for arch in archs]
    trained = range(0, len(archs), 3)
    surrogate = Surrogate([rows[i] for i in trained], rows)
    found = surrogate.predict([float(targets[i]) for i in trained])
    right = (found.mean > 0.5) == torch.tensor(targets)
    assert right.double().mean() > 0.95
    known = torch.zeros(len(archs), dtype=torch.bool)
    known[list(trained)] = True
    assert found.deviation[known].max() < found.deviation[~known].median()
