"""Checks of kernels in both databases: the last one of a key counts."""

from pathlib import Path

import pytest
from samples import checked

from archsearch.store import Store
from archsearch.store.results import kernels_passed, put_verdict


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_a_failed_check_may_be_repeated(
    tmp_path: Path, dialect: str, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/archsearch.db"
    if dialect == "postgresql":
        url = request.getfixturevalue("postgres_url")
    with Store(url, create=True) as store:
        assert kernels_passed(store.database) == set()
        for ok, passed in ((False, set()), (True, {"a"}), (True, {"a"}), (False, set())):
            with store.database.writing() as connection:
                put_verdict(connection, checked(ok).model_copy(update={"key": "a"}))
            assert kernels_passed(store.database) == passed
        with store.database.writing() as connection:
            put_verdict(connection, checked(True))
        assert kernels_passed(store.database) == {"right"}
