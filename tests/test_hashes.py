"""Hashes are the keys of results, so equal things share one and a changed copy never does."""

from pathlib import Path

import pytest
from stub_trials import stub_study

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.space import Value
from archsearch.spec import StudySpec

SPEC = stub_study(Path("unused"))


def arch(**fields: int) -> ArchSpec:
    return ArchSpec(width=32, layers=(LayerSpec(mixer="sliding_window", fields={**fields}),))


def test_defaults_written_out_are_the_same_architecture() -> None:
    assert arch(window=64).arch_hash == arch().arch_hash == arch(heads=1, window=64).arch_hash
    assert arch(window=32).arch_hash != arch().arch_hash


def test_another_name_of_a_value_is_the_same_architecture() -> None:
    named, usual = (
        LayerSpec(mixer="linear_attention", fields={"feature_map": name})
        for name in ("pos_elu", "elu")
    )
    assert named == usual
    assert (
        ArchSpec(width=32, layers=(named,)).arch_hash
        == ArchSpec(width=32, layers=(usual,)).arch_hash
    )


SAME: list[tuple[str, int, dict[str, Value], dict[str, Value]]] = [
    # a mixer, the width, and two ways to write one layer of it
    ("attention", 32, {"heads": 4, "kv_heads": 4}, {"heads": 4}),
    ("attention", 32, {"rope_base": 5.0}, {"rope_base": 500}),
    ("sliding_window", 32, {"window": 1, "rope": True, "rope_base": 5.0}, {"window": 1}),
    ("base_conv", 32, {"expand": 4}, {}),
    ("chunk_routed", 32, {"heads": 2, "groups": 2}, {"heads": 2}),
    ("chunk_routed", 32, {"weights": "none", "weights_from": "input"}, {"weights": "none"}),
    ("chunk_routed", 32, {"kv_share_max": 0.5, "kv_share_target": 0.7}, {"kv_share_max": 0.5}),
    ("gla", 32, {"gate": "scalar", "gate_rank": 4}, {"gate": "scalar"}),
    ("gla", 32, {"gate": "fixed", "gate_temperature": 4, "gate_rank": 4}, {"gate": "fixed"}),
    ("linear_attention", 32, {"random_features": 8, "max_len": 8}, {}),
    ("linear_attention", 32, {"feature_map": "elu", "compact": False}, {"feature_map": "pos_elu"}),
    ("mamba", 64, {"dt_rank": 4}, {}),
    ("mamba2", 64, {"head_dim": 64}, {}),
    ("swiglu", 16, {"ratio": 1}, {"ratio": 1.0}),
    ("swiglu", 16, {"ratio": 1.0}, {"ratio": 1.01}),
    ("rwkv_channel", 16, {"ratio": 2.0}, {"ratio": 2.02}),
]


@pytest.mark.parametrize(("mixer", "width", "one", "other"), SAME)
def test_what_makes_no_difference_is_not_in_the_hash(
    mixer: str, width: int, one: dict[str, Value], other: dict[str, Value]
) -> None:
    layers = (LayerSpec(mixer=mixer, fields=fields) for fields in (one, other))
    first, second = (ArchSpec(width=width, layers=(layer,)) for layer in layers)
    assert first.arch_hash == second.arch_hash
    assert ArchSpec.model_validate_json(first.canonical_json) == first


OTHERS: list[tuple[str, int, dict[str, Value], dict[str, Value]]] = [
    ("attention", 32, {"rope": True, "rope_base": 5.0}, {"rope": True}),
    ("sliding_window", 32, {"window": 1 << 20}, {"window": 1 << 21}),
    ("gla", 32, {"gate": "channel", "gate_rank": 4}, {"gate": "channel"}),
    ("linear_attention", 32, {"feature_map": "performer", "random_features": 8}, {}),
    ("mamba", 32, {"dt_rank": 4}, {}),
    ("mamba2", 128, {"head_dim": 128}, {}),
]


@pytest.mark.parametrize(("mixer", "width", "one", "other"), OTHERS)
def test_what_makes_a_difference_somewhere_is_in_the_hash(
    mixer: str, width: int, one: dict[str, Value], other: dict[str, Value]
) -> None:
    layers = (LayerSpec(mixer=mixer, fields=fields) for fields in (one, other))
    first, second = (ArchSpec(width=width, layers=(layer,)) for layer in layers)
    assert first.arch_hash != second.arch_hash


def test_no_channel_mixer_has_no_ratio() -> None:
    layers = (LayerSpec(mixer="attention", fields={}),)
    written = ChannelSpec(kind="none", ratio=4.0)
    assert ArchSpec(width=32, layers=layers, channel_mixer=written) == ArchSpec(
        width=32, layers=layers
    )


def test_what_cannot_be_built_stays_as_it_is_written() -> None:
    layer = LayerSpec(mixer="attention", fields={"heads": 5, "rope_base": 3.0})
    assert ArchSpec(width=32, layers=(layer,)).layers == (layer,)
    channel = ChannelSpec(kind="gone", ratio=4.0)
    assert ArchSpec(width=32, layers=(layer,), channel_mixer=channel).channel_mixer == channel


def test_a_changed_copy_has_a_hash_of_its_own() -> None:
    narrow = arch()
    before = (narrow.arch_hash, SPEC.identity, SPEC.train.canonical_json)
    wider = narrow.model_copy(update={"width": 64})
    reseeded = SPEC.model_copy(update={"seed": SPEC.seed + 1})
    longer = SPEC.train.model_copy(update={"epochs": SPEC.train.epochs + 1})
    after = (wider.arch_hash, reseeded.identity, longer.canonical_json)
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_identity_ignores_what_may_change() -> None:
    more = SPEC.search.model_copy(update={"trials": 99, "time_s": 1.0})
    assert SPEC.model_copy(update={"search": more}).identity == SPEC.identity
    other = SPEC.search.model_copy(update={"sampler": "nsga2"})
    assert SPEC.model_copy(update={"search": other}).identity != SPEC.identity
    assert StudySpec.model_validate_json(SPEC.model_dump_json()).identity == SPEC.identity
