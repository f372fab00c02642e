"""Architectures of other studies in the same database, to begin a study with.

They are looked up once, when the study begins, and kept with it: what becomes of the other studies
later changes nothing.
"""

from collections.abc import Mapping

from archsearch.arch import ArchSpec
from archsearch.architectures import project
from archsearch.compose import Assignment, compose
from archsearch.errors import UsageError
from archsearch.front import ranked
from archsearch.model_spec import ModelSpec
from archsearch.records import TrialRecord
from archsearch.space import Value
from archsearch.spec import StudySpec, StudyStart
from archsearch.store import Store


def borrowed(store: Store, spec: StudySpec) -> list[list[dict[str, Value]]]:
    """For every other study that `search.warm_start` names, decisions that lead to its trials.

    Raises:
        UsageError: there is no such study or trial, or nothing on the front of the study.
    """
    return [
        [dict(_retraced(spec.model, one.arch, one.params).params) for one in _trials(store, start)]
        for start in spec.search.warm_start
        if isinstance(start, StudyStart)
    ]


def _trials(store: Store, start: StudyStart) -> list[TrialRecord]:
    study = store.study(start.study)
    if start.trials:
        return [store.trial(start.study, number) for number in start.trials]
    ranks = ranked(study, store.trials(start.study))
    front = [trial for trial, rank in ranks if rank == 0]
    if not front:
        raise UsageError(
            f"search.warm_start: study '{start.study}' has no complete trial within its limits yet"
        )
    return front


def _retraced(model: ModelSpec, arch: ArchSpec, params: Mapping[str, Value]) -> Assignment:
    """The same architecture where a space has it by the same decisions, else its projection."""
    taken: dict[str, Value] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        kept = params.get(name)
        taken[name] = candidates[0] if kept is None or kept not in candidates else kept
        return taken[name]

    one = Assignment(compose(model, choose), taken)
    return one if one.arch.arch_hash == arch.arch_hash else project(model, arch)
