"""Members of the front have a second evaluation, by fresh seeds."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # In SQL that SQLite and PostgreSQL share: SQLite takes a reference with a new column, which
    # Alembic would add as a constraint of its own.
    op.execute(
        "ALTER TABLE archsearch_trials ADD COLUMN confirmation_id INTEGER "
        "REFERENCES archsearch_evaluations (id)"
    )
