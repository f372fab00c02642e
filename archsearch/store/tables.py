"""Tables of the database: what is kept of studies, trials, attempts and results.

Their names begin with `archsearch_`, because Optuna's own tables live at the same URL. Times are
UTC; SQLite keeps no zone, so `UtcDateTime` adds it on the way out. Big plain values (architectures,
evaluations, profiles) are JSON. The schema is made by the migrations, never from here; a test
holds the two equal.
"""

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC, with its zone on the Python side."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        assert value is None or value.tzinfo is not None
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo is not None else value.replace(tzinfo=UTC)


class PlainText(TypeDecorator[str]):
    """What people read, as every database takes it: without NUL, and its end if it is long."""

    impl = Text
    cache_ok = True
    longest = 20_000

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}")[-self.longest :]


metadata = MetaData()

studies = Table(
    "archsearch_studies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("spec", JSON, nullable=False),
    Column("identity", String(64), nullable=False),
    Column("plugins", JSON, nullable=False),
    # What the sampler setting was resolved to when the study began; budgets may change later.
    Column("sampler", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("stop_reason", String(64)),
    Column("seconds_run", Float, nullable=False),
    Column("reference", JSON, nullable=False),
    Column("device_model", String(255)),
    # The coordinator that holds the study; all null if nobody does.
    Column("lease_token", String(64)),
    Column("lease_holder", JSON),
    Column("lease_until", UtcDateTime),
    # What somebody asks of that coordinator.
    Column("request", String(16)),
)

evaluations = Table(
    "archsearch_evaluations",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("arch_hash", String(64), nullable=False),
    Column("recipe_hash", String(64), nullable=False),
    Column("evaluation", JSON, nullable=False),
    Column("weights_path", Text),
    Column("weights_sha256", String(64)),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("arch_hash", "recipe_hash", name="uq_archsearch_evaluations"),
)

profiles = Table(
    "archsearch_profiles",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("arch_hash", String(64), nullable=False),
    Column("device_model", String(255), nullable=False),
    Column("profile_key", String(64), nullable=False),
    Column("profile", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("arch_hash", "device_model", "profile_key", name="uq_archsearch_profiles"),
)

kernel_verdicts = Table(
    "archsearch_kernel_verdicts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key", String(64), nullable=False, unique=True),
    Column("ok", Boolean, nullable=False),
    Column("verdict", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

trials = Table(
    "archsearch_trials",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", ForeignKey("archsearch_studies.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("arch_hash", String(64), nullable=False),
    Column("arch", JSON, nullable=False),
    Column("params", JSON, nullable=False),
    # What the sampler noted with its proposal, so that going on later proposes the same.
    Column("sampler_notes", JSON, nullable=False),
    # Trials before this number are the peers that early stopping holds this one against.
    Column("told", Integer, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("violations", JSON, nullable=False),
    Column("duplicate_of", Integer),
    Column("failure", String(32)),
    Column("message", PlainText, nullable=False),
    Column("traceback", PlainText, nullable=False),
    Column("proposed_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("optuna_number", Integer),
    Column("from_cache", Boolean, nullable=False),
    Column("evaluation_id", ForeignKey("archsearch_evaluations.id")),
    Column("profile_id", ForeignKey("archsearch_profiles.id")),
    # By fresh seeds, of members of the front.
    Column("confirmation_id", ForeignKey("archsearch_evaluations.id")),
    # The outbox: null on a final trial that is still to be shown in MLflow.
    Column("published_at", UtcDateTime),
    UniqueConstraint("study_id", "number", name="uq_archsearch_trials"),
    Index("ix_archsearch_trials_arch_hash", "study_id", "arch_hash"),
)

attempts = Table(
    "archsearch_attempts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("trial_id", ForeignKey("archsearch_trials.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("token", String(64), nullable=False, unique=True),
    Column("state", String(16), nullable=False),
    Column("node", String(255)),
    Column("pid", Integer),
    Column("device_model", String(255)),
    Column("started_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("failure", String(32)),
    Column("message", PlainText, nullable=False),
    # An answer that came after the attempt was given up: kept for people, never used.
    Column("late_answer", JSON),
    Column("traceback", PlainText, nullable=False, server_default=text("''")),
    # Until when its worker is believed to live without another sign of life.
    Column("lease_until", UtcDateTime),
    # On a worker, times the GPUs (or CPU cores) of one trial.
    Column("device_seconds", Float, nullable=False, server_default=text("0")),
    UniqueConstraint("trial_id", "attempt", name="uq_archsearch_attempts"),
)

rungs = Table(
    "archsearch_rungs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("attempt_id", ForeignKey("archsearch_attempts.id"), nullable=False),
    Column("rung", Integer, nullable=False),
    Column("report", JSON, nullable=False),
    UniqueConstraint("attempt_id", "rung", name="uq_archsearch_rungs"),
)
