"""The search space counted, walked and drawn from: three views of one structure."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import MODELS

from archsearch.arch import ArchSpec
from archsearch.compose import compose, count, draw, walk
from archsearch.model_spec import ChannelOption, ModelSpec, Option, Slot
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
