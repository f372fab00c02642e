"""The search space counted, walked and drawn from: three views of one structure."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import MODELS

from archsearch.arch import ArchSpec
from archsearch.compose import compose, count, draw, walk
from archsearch.model_spec import Block, ChannelOption, ModelSpec, Option, Slot
from archsearch.space import Value


def leaves(model: ModelSpec) -> list[ArchSpec]:
    """Every architecture that `compose` can be led to, found by nothing but its questions."""
    found = []
    pending: list[list[Value]] = [[]]
    while pending:
        answers = pending.pop()
        asked: list[tuple[Value, ...]] = []

        def choose(
            _name: str,
            candidates: tuple[Value, ...],
            answers: list[Value] = answers,
            asked: list[tuple[Value, ...]] = asked,
        ) -> Value:
            asked.append(candidates)
            return answers[len(asked) - 1] if len(asked) <= len(answers) else candidates[0]

        found.append(compose(model, choose))
        for depth in range(len(answers), len(asked)):
            prefix = answers + [options[0] for options in asked[len(answers) : depth]]
            pending += [[*prefix, value] for value in asked[depth][1:]]
    return found


@settings(deadline=None, max_examples=60)
@given(MODELS)
def test_count_and_walk_agree_with_the_questions_of_compose(model: ModelSpec) -> None:
    reached = leaves(model)
    walked = [one.arch.arch_hash for one in walk(model)]
    assert count(model) == len(reached)
    assert len(walked) == len(set(walked)), "an architecture is walked twice"
    assert set(walked) == {arch.arch_hash for arch in reached}


@settings(deadline=None, max_examples=60)
@given(MODELS, st.integers(0, 2**32 - 1))
def test_every_drawn_architecture_is_in_the_walk(model: ModelSpec, seed: int) -> None:
    walked = {one.arch.arch_hash for one in walk(model)}
    rng = random.Random(seed)
    drawn = [draw(model, rng) for _ in range(5)]
    assert {one.arch.arch_hash for one in drawn} <= walked
    again = random.Random(seed)
    assert [draw(model, again) for _ in range(5)] == drawn, "one seed, one sequence"


@settings(deadline=None, max_examples=60)
@given(MODELS)
def test_only_open_decisions_are_asked_and_each_once(model: ModelSpec) -> None:
    asked: list[str] = []

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        assert len(candidates) > 1, f"{name} has one candidate"
        assert name not in asked
        asked.append(name)
        return candidates[-1]

    arch = compose(model, choose)
    assert arch.width == model.width[-1]
    places = {"width", "repeat", "channel_mixer", "tie"}
    places |= {f"layer{i}" for i in range(len(model.layers))}
    assert {name.split(".")[0] for name in asked} <= places


def test_choices_are_named_by_layer_mixer_and_field() -> None:
    searched = Slot(
        options=(Option(mixer="base_conv"), Option(mixer="attention", fields={"heads": (1, 2)}))
    )
    model = ModelSpec(
        width=(8, 16),
        layers=(Slot(options=(Option(mixer="base_conv"),)), searched),
        repeat=(1, 2),
        channel_mixer=(ChannelOption(), ChannelOption(kind="swiglu", ratio=(2.0, 4.0))),
    )
    asked: list[str] = []

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        asked.append(name)
        return candidates[-1]

    arch = compose(model, choose)
    assert asked == [
        "width",
        "repeat",
        "layer1.mixer",
        "layer1.attention.heads",
        "channel_mixer",
        "channel_mixer.swiglu.ratio",
    ]
    assert [layer.mixer for layer in arch.layers] == ["base_conv", "attention"] * 2
    assert (arch.width, arch.layers[1].fields["heads"], arch.channel_mixer.ratio) == (16, 2, 4.0)


def test_a_layer_left_out_makes_equal_choices_one_architecture() -> None:
    absent = Option(mixer="none")
    slot = Slot(options=(absent, Option(mixer="base_conv")))
    model = ModelSpec(width=(8,), layers=(slot, slot))
    assert count(model) == 4
    assert [len(one.arch.layers) for one in walk(model)] == [0, 1, 2]


def asked_for(model: ModelSpec) -> list[set[str]]:
    """The names asked for on the way to each architecture of a space."""
    return [set(one.params) for one in walk(model)]


def test_a_field_that_makes_no_difference_is_not_asked_for() -> None:
    maps: dict[str, tuple[Value, ...]] = {
        "feature_map": ("elu", "performer"),
        "random_features": (8, 16),
    }
    model = ModelSpec(
        width=(8,), layers=(Slot(options=(Option(mixer="linear_attention", fields=maps),)),)
    )
    kind, size = (f"layer0.linear_attention.{name}" for name in maps)
    assert asked_for(model) == [{kind}, {kind, size}, {kind, size}]
    assert count(model) == 4, "as written"


def test_whether_a_field_makes_a_difference_is_asked_at_each_width() -> None:
    """A rank of 4 is what 0 means at a width of 64."""
    slot = Slot(options=(Option(mixer="mamba", fields={"dt_rank": (0, 4)}),))
    model = ModelSpec(width=(64, 128), layers=(slot,))
    rank = "layer0.mamba.dt_rank"
    assert asked_for(model) == [{"width"}, {"width", rank}, {"width", rank}]


def test_a_part_chooses_what_may_make_a_difference_at_its_own_width() -> None:
    part = Slot(options=(Option(mixer="mamba", fields={"dt_rank": (0, 4)}),))
    other = Slot(options=(Option(mixer="attention"),))
    option = Option(mixer="parallel", fields={"merge": ("heads",)}, parts=(part, other))
    model = ModelSpec(width=(64,), layers=(Slot(options=(option,)),))
    assert len(asked_for(model)) == 2


def test_what_is_not_asked_for_in_one_copy_is_tied_in_the_others() -> None:
    fields: dict[str, tuple[Value, ...]] = {"rope": (False, True), "rope_base": (1e3, 1e4)}
    slot = Slot(options=(Option(mixer="attention", fields=fields),))
    model = ModelSpec(width=(8,), layers=(Block(repeat=(2,), layers=(slot,), untied=("rope",)),))
    found = [one.arch for one in walk(model)]
    assert len(found) == 1 + 3 * 2
    bases = [
        {one.fields["rope_base"] for one in arch.layers if one.fields["rope"]} for arch in found
    ]
    assert {len(base) for base in bases} == {0, 1}
