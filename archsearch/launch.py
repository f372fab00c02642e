"""Runs a study for a person: progress, publishing, and what to say at the end."""

import json
import sys
from typing import TextIO

from archsearch.coordinator import run_study
from archsearch.errors import EXIT_INTERRUPTED, EXIT_NOTHING_COMPLETE
from archsearch.messages import PluginFile
from archsearch.progress import make_progress
from archsearch.snapshot import StudyOutcome
from archsearch.spec import StudySpec
from archsearch.store import Store
from archsearch.tables import front_text, front_values, losses_text
from archsearch.tracking import Publisher


def launch(
    spec: StudySpec,
    plugins: tuple[PluginFile, ...],
    address: str | None,
    stream: TextIO,
    as_json: bool,
) -> int:
    """Run a study, say how it went, and return the exit code.

    With `as_json` the progress goes to standard error and the front, as JSON, to the stream.
    """
    uri, storage = spec.tracking.mlflow, spec.tracking.storage
    publisher = Publisher(storage, spec.study, uri) if uri is not None else None
    with make_progress(sys.stderr if as_json else stream) as progress:
        outcome = run_study(spec, plugins, progress, publisher, address)
    with Store(storage) as store:
        study, trials = store.study(spec.study), store.trials(spec.study)
    if as_json:
        print(json.dumps(front_values(study, trials), indent=2), file=stream)
    else:
        texts = (front_text(study, trials), losses_text(trials))
        print(_words(outcome, texts, spec), file=stream)
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return 0 if outcome.last.complete else EXIT_NOTHING_COMPLETE


def _words(outcome: StudyOutcome, texts: tuple[str, ...], spec: StudySpec) -> str:
    lines = list(outcome.repaired)
    for text in texts:
        lines += ["", text] if text else []
    if spec.tracking.mlflow is not None and not outcome.interrupted:
        lines += ["", f"Browse it: archsearch ui {spec.study}"]
    return "\n".join(lines)
