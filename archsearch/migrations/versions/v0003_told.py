"""Trials note how many ended trials their proposal knew of: their peers in early stopping.

Trials that are there already were never stopped, and have no peers.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    column = sa.Column("told", sa.Integer, nullable=False, server_default="0")
    op.add_column("archsearch_trials", column)
