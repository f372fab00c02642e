"""Blocks, ratios and ties: what they stand for, and that every way into a space stays in it."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import MODELS, PRESENT, STACKED, ratios
from stub_trials import stub_study

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.architectures import project, published_architecture
from archsearch.compose import answer, compose, count, draw, walk
from archsearch.model_spec import (
    Block,
    ModelSpec,
    Option,
    Piece,
    Ratio,
    Share,
    Slot,
    layers_of,
    positions,
)
from archsearch.propose.corners import neighbours
from archsearch.propose.sampler import Proposer, distributions_of
from archsearch.space import Value

SPEC = stub_study(Path("unused"))
WINDOWS = Slot(options=(Option(mixer="sliding_window", fields={"window": (4, 8)}),))
ATTENTION = Slot(options=(Option(mixer="attention", fields={"heads": (1, 2)}),))
CONV = Slot(options=(Option(mixer="base_conv"),))


def model_of(*pieces: Piece) -> ModelSpec:
    return ModelSpec(width=(16,), layers=pieces)


def chosen(model: ModelSpec, **answers: Value) -> ArchSpec:
    """The architecture of some answers, by topic; the first candidate to every other question."""
    return answer(model, lambda question: answers.get(question.topic, question.candidates[0]))


@settings(deadline=None, max_examples=60)
@given(MODELS, st.integers(0, 2**32 - 1))
def test_every_choice_builds_and_one_name_has_one_set_of_candidates(
    model: ModelSpec, seed: int
) -> None:
    rng = random.Random(seed)
    known: dict[str, tuple[Value, ...]] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        assert known.setdefault(name, candidates) == candidates, name
        assert len(set(candidates)) == len(candidates) > 1
        return rng.choice(candidates)

    for _ in range(8):
        arch = compose(model, choose)
        assert len(arch.configs()) == len(arch.layers) <= model.deepest
        assert ArchSpec.model_validate_json(arch.canonical_json) == arch


@settings(deadline=None, max_examples=40)
@given(MODELS, st.integers(0, 2**32 - 1))
def test_a_stored_choice_is_placed_as_it_was_proposed(model: ModelSpec, seed: int) -> None:
    spec = SPEC.model_copy(update={"model": model, "seed": seed})
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model
    first, again = (Proposer(spec, {"name": "random"}) for _ in range(2))
    for _ in range(3):
        made = first.ask()
        assert {*distributions_of(model, made.params)} == {*made.params}
        placed = again.place(made.params, made.notes)
        assert (placed.arch, placed.params) == (made.arch, made.params)
        assert compose(model, lambda name, _, made=made: made.params[name]) == made.arch


@settings(deadline=None, max_examples=40)
@given(STACKED, st.integers(0, 2**32 - 1))
def test_neighbours_and_projections_stay_in_the_space(model: ModelSpec, seed: int) -> None:
    inside = {one.arch.arch_hash for one in walk(model)}
    rng = random.Random(seed)
    start = draw(model, rng)
    for near in itertools.islice(neighbours(model, start.params, rng), 25):
        assert near.arch.arch_hash in inside
        assert compose(model, lambda name, _, near=near: near.params[name]) == near.arch
    for name in ("based-363M", "samba", "transformer_pp"):
        found = project(model, published_architecture(name).build())
        assert found.arch.arch_hash in inside
        assert {*distributions_of(model, found.params)} == {*found.params}


@settings(deadline=None, max_examples=60)
@given(ratios(), st.integers(0, 2**32 - 1))
def test_a_ratio_has_the_layers_and_the_shares_asked_for(ratio: Ratio, seed: int) -> None:
    # The mixers of each part get a field's value that tells the parts apart.
    marked = [
        Slot(options=(Option(mixer="sliding_window", fields={"window": (4 * 2**i,)}),))
        for i in range(len(ratio.mix) + 1)
    ]
    mix = tuple(
        part.model_copy(update={"layer": slot})
        for part, slot in zip(ratio.mix, marked, strict=False)
    )
    ratio = ratio.model_copy(update={"mix": mix, "rest": marked[-1], "untied": ()})
    one = draw(model_of(ratio), random.Random(seed))
    of = one.params.get("layer0.of", ratio.of[0])
    assert len(one.arch.layers) == of
    left = of
    for index, part in enumerate(ratio.mix):
        number = sum(layer.fields["window"] == 4 * 2**index for layer in one.arch.layers)
        assert number in {int(share * of + 0.5) for share in part.share}
        left -= number
    assert left == sum(layer.fields["window"] == 4 * 2 ** len(mix) for layer in one.arch.layers)


@settings(deadline=None, max_examples=60)
@given(STACKED, st.integers(0, 2**32 - 1))
def test_copies_are_alike_but_for_what_is_untied(model: ModelSpec, seed: int) -> None:
    block = Block(repeat=(3,), layers=model.layers)
    layers = draw(model_of(block), random.Random(seed)).arch.layers
    assert layers == layers[: len(layers) // 3] * 3


def together(layers: tuple[LayerSpec, ...], field: str) -> set[Value]:
    return {layer.fields[field] for layer in layers}


def test_an_untied_field_is_chosen_for_every_copy() -> None:
    tied = Block(repeat=(3,), layers=(CONV, WINDOWS))
    assert count(model_of(tied)) == 2
    untied = tied.model_copy(update={"untied": ("window",)})
    archs = [one.arch for one in walk(model_of(untied))]
    assert len(archs) == count(model_of(untied)) == 2**3
    seen = {tuple(layer.fields["window"] for layer in arch.layers[1::2]) for arch in archs}
    assert seen == set(itertools.product((4, 8), repeat=3))


def test_an_untied_mixer_leaves_its_fields_tied() -> None:
    slot = Slot(options=(*WINDOWS.options, *CONV.options))
    model = model_of(Block(repeat=(3,), layers=(slot,), untied=("mixer",)))
    # 2 ** 3 orders, of which all but the one without a window have one choice of 2.
    assert count(model) == (2**3 - 1) * 2 + 1 == len(list(walk(model)))
    for one in walk(model):
        windows = [layer for layer in one.arch.layers if layer.mixer == "sliding_window"]
        assert len(together(tuple(windows), "window")) <= 1


def test_slots_of_one_tie_choose_together() -> None:
    tied = Slot(options=(*WINDOWS.options, *ATTENTION.options), tie="local")
    model = model_of(tied, CONV, tied, WINDOWS)
    found = [one.arch.layers for one in walk(model)]
    assert len(found) == count(model) == 4 * 2
    assert all(layers[0] == layers[2] for layers in found)
    names = {name for one in walk(model) for name in one.params}
    assert names == {
        *("tie.local.mixer", "tie.local.sliding_window.window", "tie.local.attention.heads"),
        "layer3.sliding_window.window",
    }


@pytest.mark.parametrize(
    ("place", "number", "room", "expected"),
    [
        ("early", 2, 8, (0, 1)),
        ("late", 2, 8, (6, 7)),
        ("spread", 2, 8, (2, 6)),
        ("spread", 1, 2, (1,)),
        ("spread", 3, 12, (2, 6, 10)),
        ("spread", 3, 4, (0, 2, 3)),
        ("spread", 0, 4, ()),
    ],
)
def test_places(place: str, number: int, room: int, expected: tuple[int, ...]) -> None:
    assert positions(place, number, room) == expected


@given(st.integers(0, 256), st.integers(0, 256))
def test_every_place_takes_as_many_as_asked(number: int, more: int) -> None:
    for place in ("early", "late", "spread"):
        at = positions(place, number, number + more)
        assert len(set(at)) == number and list(at) == sorted(at)
        assert all(0 <= one < number + more for one in at)


@pytest.mark.parametrize(
    ("share", "depth", "expected"),
    [(0.125, 12, 2), (0.125, 4, 1), (0.125, 3, 0), (1 / 3, 12, 4), (1 / 6, 3, 1), (1.0, 7, 7)],
)
def test_a_share_is_the_nearest_number_of_layers_and_halves_go_up(
    share: float, depth: int, expected: int
) -> None:
    assert layers_of(share, depth) == expected


def mixed(*shares: float, of: tuple[int, ...] = (8,)) -> ModelSpec:
    part = Share(layer=ATTENTION, share=shares, place=("early", "late", "spread"))
    return model_of(Ratio(of=of, mix=(part,), rest=CONV))


def test_places_that_are_the_same_sequence_are_asked_once() -> None:
    # No attention: 1. One in two: early or late (the middle is the second). All: 1; times heads.
    model = mixed(0.0, 0.5, 1.0, of=(2,))
    assert count(model) == 1 + 2 * 2 + 2 == len(list(walk(model)))
    one_of_eight = mixed(1 / 8)
    assert count(one_of_eight) == 3 * 2 == len(list(walk(one_of_eight)))


def test_later_shares_are_placed_among_what_is_left_and_always_fit() -> None:
    first = Share(layer=ATTENTION, share=(0.25, 0.75), place=("late",))
    second = Share(layer=WINDOWS, share=(0.25, 0.75), place=("early",))
    model = model_of(Ratio(of=(4,), mix=(first, second), rest=CONV))
    orders = {tuple(layer.mixer for layer in one.arch.layers) for one in walk(model)}
    window, attention, conv = "sliding_window", "attention", "base_conv"
    assert orders == {
        (window, conv, conv, attention),
        (window, window, window, attention),
        (window, attention, attention, attention),
    }


def test_a_projection_has_the_share_and_place_of_the_published_layout() -> None:
    part = Share(
        layer=ATTENTION, share=(0.0, 1 / 8, 1 / 4, 1 / 2), place=("early", "late", "spread")
    )
    model = model_of(Ratio(of=(8, 16), mix=(part,), rest=CONV))

    def projected(*attention: int) -> dict[str, Value]:
        layers = [LayerSpec(mixer="gla", fields={}) for _ in range(16)]
        for index in attention:
            layers[index] = LayerSpec(mixer="attention", fields={"heads": 2})
        found = project(model, ArchSpec(width=16, layers=tuple(layers)))
        assert found.arch.layers == compose(model, lambda name, _: found.params[name]).layers
        return dict(found.params)

    late = projected(12, 13, 14, 15)
    assert late["layer0.of"] == 16
    assert (late["layer0.mix0.share"], late["layer0.mix0.place"]) == (0.25, "late")
    assert late["layer0.mix0.attention.heads"] == 2
    assert projected(1, 5, 9, 13)["layer0.mix0.place"] == "spread"
    assert projected(0, 1)["layer0.mix0.place"] == "early"
    assert projected(0, 1)["layer0.mix0.share"] == 1 / 8
    assert projected()["layer0.mix0.share"] == 0.0


@settings(deadline=None, max_examples=30)
@given(PRESENT)
def test_a_block_that_stands_once_is_its_layers(slot: Slot) -> None:
    plain = [one.arch for one in walk(model_of(slot, CONV))]
    inside = [one.arch for one in walk(model_of(Block(repeat=(1,), layers=(slot, CONV))))]
    assert [arch.arch_hash for arch in plain] == [arch.arch_hash for arch in inside]


def test_a_repeated_stack_may_hold_a_ratio() -> None:
    ratio = mixed(0.25, of=(4,)).layers[0]
    model = model_of(CONV, Block(repeat=(2, 3), layers=(ratio, WINDOWS)))
    layers = chosen(model, repeat=3, place="late").layers
    assert [layer.mixer for layer in layers[1:6]] == [
        *["base_conv"] * 3,
        "attention",
        "sliding_window",
    ]
    assert layers[1:] == layers[1:6] * 3
    assert model.deepest == 1 + 3 * 5
