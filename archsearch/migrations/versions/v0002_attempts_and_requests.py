"""Attempts have a lease, a traceback and what they used; a study can be asked to pause or stop.

A migration is history: it spells its columns out and is never edited once released.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    attempts = "archsearch_attempts"
    op.add_column(
        attempts, sa.Column("traceback", sa.Text, nullable=False, server_default=sa.text("''"))
    )
    op.add_column(attempts, sa.Column("lease_until", sa.DateTime(timezone=True)))
    op.add_column(
        attempts,
        sa.Column("device_seconds", sa.Float, nullable=False, server_default=sa.text("0")),
    )
    op.add_column("archsearch_studies", sa.Column("request", sa.String(16)))
