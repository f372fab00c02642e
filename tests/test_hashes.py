"""Hashes are the keys of results, so equal things share one and a changed copy never does."""

from pathlib import Path

from stub_trials import stub_study

from archsearch.arch import ArchSpec, LayerSpec
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
