"""Every trial of a study in Optuna's own tables, so that its dashboard and tools show it.

A view, like MLflow: proposals come from `sampler`, and our records decide. On start the view is put
right: trials that an earlier coordinator left RUNNING are ended, missing ones are added.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import optuna
from optuna.exceptions import (
    ExperimentalWarning,
    StorageInternalError,
    UpdateFinishedTrialError,
)
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial

from archsearch.errors import ServiceError, StudyRefusedError
from archsearch.propose.sampler import distributions_of
from archsearch.propose.told import Told, tell
from archsearch.space import Value
from archsearch.spec import StudySpec

_MARK = "archsearch"
_REASON = "archsearch_reason"
_PAUSES_S = (0.1, 0.2, 0.4, 0.8)


class Mirror:
    """One study in Optuna's tables.

    Args:
        spec: the study; the Optuna study has its name.
        url: SQLAlchemy URL, the store's own.
        engine_options: keyword arguments for SQLAlchemy's engine, the store's own.

    Raises:
        StudyRefusedError: Optuna has a study of this name that is not ours.
        ServiceError: Optuna's tables cannot be opened.
    """

    def __init__(self, spec: StudySpec, url: str, engine_options: Mapping[str, Any]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spec = spec
        self._storage = _open(url, engine_options)
        directions = [objective.direction for objective in spec.objectives]
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=spec.study,
            directions=directions,
            load_if_exists=True,
        )
        self._study_id = self._storage.get_study_id_from_name(spec.study)
        if _MARK not in self._study.user_attrs:
            if self._study.get_trials(deepcopy=False):
                raise StudyRefusedError(
                    f"Optuna already has a study '{spec.study}' in this database that archsearch "
                    "did not make; give this study another name (`study:`)"
                )
            self._study.set_user_attr(_MARK, spec.identity)
            with warnings.catch_warnings():
                # Optuna calls names of objectives experimental; they only label its charts.
                warnings.simplefilter("ignore", ExperimentalWarning)
                self._study.set_metric_names([one.metric for one in spec.objectives])

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def add(self, params: Mapping[str, Value], notes: Mapping[str, Any]) -> int:
        """Show a trial as RUNNING and return Optuna's number for it.

        Args:
            notes: what to show beside it: our number, the architecture in one line, its hash.
        """
        distributions = distributions_of(self._spec.model, params)
        template = create_trial(
            state=TrialState.RUNNING,
            params={name: params[name] for name in distributions},
            distributions=distributions,
            user_attrs=dict(notes),
        )
        with _service_errors():
            trial_id = self._storage.create_new_trial(self._study_id, template_trial=template)
            return self._storage.get_trial_number_from_id(trial_id)

    def tell(self, optuna_number: int, told: Told, reason: str = "") -> None:
        """End a trial. `reason` says why it has no values.

        Raises StudyRefusedError if another process has ended it: then the study is not ours.
        """
        with _service_errors():
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(
                self._study_id, optuna_number
            )
            try:
                if reason:
                    self._storage.set_trial_user_attr(trial_id, _REASON, reason)
                tell(self._study, self._storage, self._study_id, optuna_number, told)
            except (ValueError, UpdateFinishedTrialError) as error:
                if not self._storage.get_trial(trial_id).state.is_finished():
                    raise
                raise StudyRefusedError(
                    f"study '{self._spec.study}' was taken from this coordinator: another process "
                    f"has ended Optuna's trial {optuna_number}. This one stops"
                ) from error

    def running(self) -> set[int]:
        """Optuna's numbers of all trials that it takes to be running."""
        found = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return {trial.number for trial in found}


def _open(url: str, engine_options: Mapping[str, Any]) -> RDBStorage:
    """Open Optuna's storage, with patience: first starts at once may all make its tables."""
    for pause_s in _PAUSES_S:
        with suppress(Exception):
            return RDBStorage(url, engine_kwargs=dict(engine_options))
        time.sleep(pause_s)
    try:
        return RDBStorage(url, engine_kwargs=dict(engine_options))
    except Exception as error:
        text = " ".join(str(error).split())
        raise ServiceError(f"Optuna's tables cannot be opened: {text}") from error


@contextmanager
def _service_errors() -> Iterator[None]:
    try:
        yield
    except StorageInternalError as error:
        reason = error.__cause__ or error
        raise ServiceError(f"Optuna's tables cannot be written: {reason}") from error
