"""Claiming a study: one coordinator holds it by a lease, and only if it is the same study.

A study of a name is made by its first claim. A later claim is refused while another coordinator
holds it, or if what may not change has changed: results of two search spaces, tasks or seeds do not
belong on one front. Budgets, resources and places may change and are stored anew.
"""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from archsearch.errors import StudyRefusedError
from archsearch.messages import PluginFile
from archsearch.spec import StudySpec
from archsearch.store.holder import LEASE_S, Holder, living_holder
from archsearch.store.ledger import Ledger
from archsearch.store.reading import Store
from archsearch.store.tables import studies


def claim(
    store: Store, spec: StudySpec, plugins: tuple[PluginFile, ...], sampler: Mapping[str, Any]
) -> Ledger:
    """Take the lease of a study, making the study if it is new.

    Args:
        sampler: what the sampler setting resolves to; kept from the first claim on.

    Raises:
        StudyRefusedError: another coordinator holds it, or it is another study of that name.
        ServiceError: the database cannot be written.
    """
    try:
        return _claim(store, spec, plugins, sampler)
    except IntegrityError:
        # Somebody made the same study between our look and our insert; now it exists.
        return _claim(store, spec, plugins, sampler)


def _claim(
    store: Store, spec: StudySpec, plugins: tuple[PluginFile, ...], sampler: Mapping[str, Any]
) -> Ledger:
    now, token, me = datetime.now(UTC), uuid.uuid4().hex, Holder.this_process()
    lease = {
        "lease_token": token,
        "lease_holder": me.plain(),
        "lease_until": now + timedelta(seconds=LEASE_S),
        "spec": spec.model_dump(mode="json"),
        "identity": spec.identity,
        "plugins": [plugin.model_dump(mode="json") for plugin in plugins],
        "stop_reason": None,
        "request": None,
    }
    found = sa.select(studies).where(studies.c.name == spec.study).with_for_update()
    with store.database.writing() as connection:
        row = connection.execute(found).mappings().one_or_none()
        if row is None:
            fresh = {"name": spec.study, "created_at": now, "seconds_run": 0.0, "reference": {}}
            insert = sa.insert(studies).values(**lease, **fresh, sampler=dict(sampler))
            study_id = connection.scalars(insert.returning(studies.c.id)).one()
            taken_from = None
        else:
            _check_same_study(row, spec, plugins)
            _check_free(row)
            study_id = row["id"]
            taken_from = Holder.from_plain(row["lease_holder"]) if row["lease_holder"] else None
            connection.execute(sa.update(studies).where(studies.c.id == study_id).values(**lease))
    return Ledger(
        database=store.database,
        study=spec.study,
        study_id=study_id,
        token=token,
        taken_from=taken_from,
    )


def _check_free(row: sa.RowMapping) -> None:
    holder = living_holder(row)
    if holder is None:
        return
    left = (row["lease_until"] - datetime.now(UTC)).total_seconds()
    raise StudyRefusedError(
        f"study '{row['name']}' is held by another coordinator: {holder}; wait until it is done or "
        f"stop it. If it died on another machine, its hold ends in {left:.0f} s. To run beside it, "
        "give this study another name (`study:`)"
    )


def _check_same_study(row: sa.RowMapping, spec: StudySpec, plugins: tuple[PluginFile, ...]) -> None:
    stored = StudySpec.model_validate(row["spec"])
    before, now = stored.fixed, spec.fixed
    differing = [part for part in now if before[part] != now[part]]
    sources = {plugin["name"]: plugin["source"] for plugin in row["plugins"]}
    if sources != {plugin.name: plugin.source for plugin in plugins}:
        differing.append("plugins")
    if differing:
        raise StudyRefusedError(
            f"study '{row['name']}' exists already and is a different one; these parts differ: "
            f"{', '.join(differing)}. Put them back, or give this study another name (`study:`); "
            "trials, time, resources and tracking may change"
        )
