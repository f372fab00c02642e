"""Which study is meant, and in which database: from a path, a name, or nothing at all.

Reading never makes a database. Knows nothing of the command line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from archsearch.errors import UsageError
from archsearch.spec import TrackingSpec
from archsearch.store import Store
from archsearch.study_file import load_study


@dataclass(frozen=True)
class Place:
    """A database, and the name of the study that is meant; None if none was named."""

    storage: str
    study: str | None


def is_file(study: str) -> bool:
    """True if a STUDY argument is a path to a study file rather than a stored name."""
    return Path(study).suffix in (".yaml", ".yml") or "/" in study


def locate(study: str | None, storage: str | None) -> Place:
    """Resolve a STUDY argument. A study file names its database, unless one is given.

    Raises SpecError for a file that cannot be read.
    """
    if study is None or not is_file(study):
        return Place(storage or TrackingSpec().storage, study)
    spec = load_study(Path(study))
    return Place(storage or spec.tracking.storage, spec.study)


@contextmanager
def opened(place: Place) -> Iterator[tuple[Store, str]]:
    """The database and the name of the study; the only one if none was named.

    Raises:
        ServiceError: there is no such database, or it cannot be used.
        UsageError: no study, no such study, or several to choose from.
    """
    with Store(place.storage) as store:
        yield store, place.study or _only(store, place.storage)


def _only(store: Store, storage: str) -> str:
    names = store.studies()
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{storage} holds no study yet; run one with: archsearch run STUDY.yaml")
    raise UsageError(f"{storage} holds {len(names)} studies; name one of: {', '.join(names)}")
