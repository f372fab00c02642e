"""Takes the model of a stored trial home: finds its weights and writes a bundle."""

import hashlib
from pathlib import Path

from archsearch.bundle import save_bundle
from archsearch.display import loss_title, shown_metrics, task_title, written
from archsearch.errors import ServiceError, UsageError
from archsearch.records import StudyRecord, TrialRecord, TrialState
from archsearch.store import Store


def export_trial(store: Store, study: str, number: int, folder: Path) -> str:
    """Write the trained model of a trial into `folder`; return a sentence on what was written.

    The model of a duplicate is that of the trial it repeats.

    Raises:
        UsageError: no such trial, one without a model, or a folder in use or not to be written.
        ServiceError: its weights are not on this machine, cannot be read, or have changed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder; name a new one")
    record = store.study(study)
    trial = store.trial(study, number)
    if trial.duplicate_of is not None:
        trial = store.trial(study, trial.duplicate_of)
    if trial.state is not TrialState.COMPLETE or trial.weights_path is None:
        raise UsageError(
            f"trial {number} of '{study}' is {trial.state} and has no trained model; "
            "`archsearch front` lists trials that have one"
        )
    weights = Path(trial.weights_path)
    if not weights.is_file():
        raise ServiceError(
            f"the weights of trial {number} are not at {weights}; export where the study ran, "
            "or bring that file here"
        )
    try:
        trained = weights.read_bytes()
    except OSError as error:
        raise ServiceError(f"{weights} cannot be read: {error.strerror}") from error
    found = hashlib.sha256(trained).hexdigest()
    if found != trial.weights_sha256:
        raise ServiceError(
            f"{weights} does not hold the weights of trial {number}: its SHA-256 is {found}, that "
            f"of the trained weights is {trial.weights_sha256}. Put the file back from a copy"
        )
    vocab_size, about = record.spec.vocab_size, _about(record, trial)
    try:
        save_bundle(folder, trial.arch, vocab_size, trained, about, record.plugins)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return (
        f"{trial.arch.summary} is in {folder}: weights, architecture, README. "
        f"Try it: python {folder / 'generate.py'}"
    )


def _about(study: StudyRecord, trial: TrialRecord) -> dict[str, object]:
    scores = {name: written(name, trial.metrics.get(name)) for name in shown_metrics(study.spec)}
    return {
        "study": study.name,
        "trial": trial.number,
        "task": task_title(study.spec.task) + loss_title(study.spec.train),
        **({"last token": "[MASK], for training"} if study.spec.train.objective else {}),
        **scores,
    }
