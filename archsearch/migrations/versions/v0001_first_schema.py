"""First schema: studies, trials, attempts, rungs, evaluations and profiles.

A migration is history: it spells its tables out and is never edited once released.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _moment(name: str, nullable: bool = True) -> "sa.Column[object]":
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    _results()
    _studies()
    _trials()
    _attempts()


def _studies() -> None:
    op.create_table(
        "archsearch_studies",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(255), nullable=False, unique=True),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("identity", sa.String(64), nullable=False),
        sa.Column("plugins", sa.JSON, nullable=False),
        sa.Column("sampler", sa.JSON, nullable=False),
        _moment("created_at", nullable=False),
        sa.Column("stop_reason", sa.String(64)),
        sa.Column("seconds_run", sa.Float, nullable=False),
        sa.Column("reference", sa.JSON, nullable=False),
        sa.Column("device_model", sa.String(255)),
        sa.Column("lease_token", sa.String(64)),
        sa.Column("lease_holder", sa.JSON),
        _moment("lease_until"),
    )


def _results() -> None:
    op.create_table(
        "archsearch_evaluations",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("arch_hash", sa.String(64), nullable=False),
        sa.Column("recipe_hash", sa.String(64), nullable=False),
        sa.Column("evaluation", sa.JSON, nullable=False),
        sa.Column("weights_path", sa.Text),
        sa.Column("weights_sha256", sa.String(64)),
        _moment("created_at", nullable=False),
        sa.UniqueConstraint("arch_hash", "recipe_hash", name="uq_archsearch_evaluations"),
    )
    op.create_table(
        "archsearch_profiles",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("arch_hash", sa.String(64), nullable=False),
        sa.Column("device_model", sa.String(255), nullable=False),
        sa.Column("profile_key", sa.String(64), nullable=False),
        sa.Column("profile", sa.JSON, nullable=False),
        _moment("created_at", nullable=False),
        sa.UniqueConstraint(
            "arch_hash", "device_model", "profile_key", name="uq_archsearch_profiles"
        ),
    )


def _trials() -> None:
    op.create_table(
        "archsearch_trials",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("archsearch_studies.id"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("arch_hash", sa.String(64), nullable=False),
        sa.Column("arch", sa.JSON, nullable=False),
        sa.Column("params", sa.JSON, nullable=False),
        sa.Column("sampler_notes", sa.JSON, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("violations", sa.JSON, nullable=False),
        sa.Column("duplicate_of", sa.Integer),
        sa.Column("failure", sa.String(32)),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("traceback", sa.Text, nullable=False),
        _moment("proposed_at", nullable=False),
        _moment("finished_at"),
        sa.Column("optuna_number", sa.Integer),
        sa.Column("from_cache", sa.Boolean, nullable=False),
        sa.Column("evaluation_id", sa.Integer, sa.ForeignKey("archsearch_evaluations.id")),
        sa.Column("profile_id", sa.Integer, sa.ForeignKey("archsearch_profiles.id")),
        _moment("published_at"),
        sa.UniqueConstraint("study_id", "number", name="uq_archsearch_trials"),
    )
    op.create_index(
        "ix_archsearch_trials_arch_hash", "archsearch_trials", ["study_id", "arch_hash"]
    )


def _attempts() -> None:
    op.create_table(
        "archsearch_attempts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("archsearch_trials.id"), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("token", sa.String(64), nullable=False, unique=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("node", sa.String(255)),
        sa.Column("pid", sa.Integer),
        sa.Column("device_model", sa.String(255)),
        _moment("started_at", nullable=False),
        _moment("finished_at"),
        sa.Column("failure", sa.String(32)),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("late_answer", sa.JSON),
        sa.UniqueConstraint("trial_id", "attempt", name="uq_archsearch_attempts"),
    )
    op.create_table(
        "archsearch_rungs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "attempt_id", sa.Integer, sa.ForeignKey("archsearch_attempts.id"), nullable=False
        ),
        sa.Column("rung", sa.Integer, nullable=False),
        sa.Column("report", sa.JSON, nullable=False),
        sa.UniqueConstraint("attempt_id", "rung", name="uq_archsearch_rungs"),
    )
