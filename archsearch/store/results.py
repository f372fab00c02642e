"""Results that belong to no one study: evaluations, profiles, checks of kernels.

An evaluation is keyed by architecture and recipe (data, training, seed, code); a profile by
architecture, device model and the way it was measured. The first result of a key stays: a second
one is the same work done twice, and what was told of it should not change. Of a kernel's checks the
last one stays: one that failed is repeated, one that passed is not.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.dialects import postgresql, sqlite

from archsearch.messages import Checked, Evaluation, Profile
from archsearch.store.database import Database
from archsearch.store.tables import evaluations, kernel_verdicts, profiles


@dataclass(frozen=True)
class KnownEvaluation:
    """A stored evaluation, and the number of its row."""

    row: int
    evaluation: Evaluation


@dataclass(frozen=True)
class KnownProfile:
    """A stored profile, and the number of its row."""

    row: int
    profile: Profile


def plain(message: BaseModel) -> Any:
    """A message as plain JSON values; what JSON cannot hold, such as NaN, is null."""
    return json.loads(message.model_dump_json())


def find_evaluation(database: Database, arch_hash: str, recipe_hash: str) -> KnownEvaluation | None:
    """The evaluation of an architecture under a recipe, if there is one."""
    statement = sa.select(evaluations.c.id, evaluations.c.evaluation).where(
        evaluations.c.arch_hash == arch_hash, evaluations.c.recipe_hash == recipe_hash
    )
    with database.reading() as connection:
        row = connection.execute(statement).one_or_none()
    return KnownEvaluation(row[0], Evaluation.model_validate(row[1])) if row is not None else None


def find_profile(
    database: Database, arch_hash: str, device_model: str, profile_key: str
) -> KnownProfile | None:
    """The profile of an architecture on a device model, measured in this way, if there is one."""
    statement = sa.select(profiles.c.id, profiles.c.profile).where(
        profiles.c.arch_hash == arch_hash,
        profiles.c.device_model == device_model,
        profiles.c.profile_key == profile_key,
    )
    with database.reading() as connection:
        row = connection.execute(statement).one_or_none()
    return KnownProfile(row[0], Profile.model_validate(row[1])) if row is not None else None


def put_evaluation(
    connection: sa.Connection, evaluation: Evaluation, weights_path: str, weights_sha256: str
) -> int:
    """Store an evaluation unless its key has one; return the row that holds the key."""
    key = {"arch_hash": evaluation.arch_hash, "recipe_hash": evaluation.recipe_hash}
    rest = {
        "evaluation": plain(evaluation),
        "weights_path": weights_path,
        "weights_sha256": weights_sha256,
    }
    return _put(connection, evaluations, key, rest)


def put_profile(connection: sa.Connection, profile: Profile, profile_key: str) -> int:
    """Store a profile unless its key has one; return the row that holds the key."""
    key = {
        "arch_hash": profile.arch_hash,
        "device_model": profile.device_model,
        "profile_key": profile_key,
    }
    return _put(connection, profiles, key, {"profile": plain(profile)})


def put_verdict(connection: sa.Connection, checked: Checked) -> None:
    """Store what a check of a kernel found."""
    found = {"ok": checked.ok, "verdict": plain(checked), "created_at": datetime.now(UTC)}
    insert = _insert(connection, kernel_verdicts).values(key=checked.key, **found)
    connection.execute(insert.on_conflict_do_update(index_elements=["key"], set_=found))


def kernels_passed(database: Database) -> set[str]:
    """Keys of all checks that kernels have passed."""
    statement = sa.select(kernel_verdicts.c.key).where(kernel_verdicts.c.ok)
    with database.reading() as connection:
        return set(connection.scalars(statement))


def _put(
    connection: sa.Connection, table: sa.Table, key: Mapping[str, str], rest: Mapping[str, Any]
) -> int:
    values = {**key, **rest, "created_at": datetime.now(UTC)}
    connection.execute(_insert(connection, table).values(values).on_conflict_do_nothing())
    same = [table.c[name] == value for name, value in key.items()]
    row: int = connection.scalars(sa.select(table.c.id).where(*same)).one()
    return row


def _insert(connection: sa.Connection, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    """Of the dialect: SQLAlchemy's own knows no conflicts."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)
