"""StudySpec: a study after reading, in its one normal form. Plain data, JSON in and out.

Everything optional in the YAML is filled in here: recipes are spelled out, every searched field
lists its candidates, every objective its context and batch. `study_file` turns YAML into this;
workers and the database hold its JSON. Knows nothing of YAML, line numbers or Optuna.
"""

import hashlib
import json
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict

from archsearch.space import Value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @cached_property
    def canonical_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()[:16]


class Option(_Frozen):
    """One alternative of a slot: a mixer and the candidates of each searched or narrowed field.

    Fields that are not listed keep their defaults. One candidate means fixed.
    """

    mixer: str
    fields: dict[str, tuple[Value, ...]] = {}


class Slot(_Frozen):
    """One place in the order of depth; more than one option means that the mixer is searched."""

    options: tuple[Option, ...]


class ChannelOption(_Frozen):
    """One alternative for the channel mixer, with the candidates of its inner ratio."""

    kind: Literal["none", "swiglu"] = "none"
    ratio: tuple[float, ...] = ()


class ModelSpec(_Frozen):
    """The space of architectures: width, slots, how often the block of slots repeats, MLP."""

    width: tuple[int, ...]
    layers: tuple[Slot, ...]
    repeat: tuple[int, ...] = (1,)
    channel_mixer: tuple[ChannelOption, ...] = (ChannelOption(),)


class Segment(_Frozen):
    """`examples` sequences of `length` tokens holding `pairs` key-value pairs."""

    length: int
    pairs: int
    examples: int


class MqarSpec(_Frozen):
    """Multi-query associative recall. The selection and the report split use the same segments
    and different examples."""

    kind: Literal["mqar"] = "mqar"
    recipe: str
    vocab_size: int
    train: tuple[Segment, ...]
    test: tuple[Segment, ...]
    power_a: float = 0.01
    random_filler: bool = True
    seed: int = 0

    @property
    def longest(self) -> int:
        """Length of the longest test sequence, in tokens; the default context of objectives."""
        return max(segment.length for segment in self.test)


class TrainSpec(_Frozen):
    """How one population is trained. Part of the key of every evaluation."""

    learning_rates: tuple[float, ...]
    seeds: int
    epochs: int
    batch_size: int
    test_batch_size: int
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float | None = None
    schedule: Literal["constant", "cosine_per_epoch", "cosine_per_step"] = "cosine_per_epoch"
    warmup_steps: int = 0
    embed_dropout: float = 0.0
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    rungs: int = 1
    """Evaluations on the selection split, evenly spaced over training; the last is at its end."""

    @property
    def population(self) -> int:
        return len(self.learning_rates) * self.seeds


Metric = Literal[
    "recall",
    "state_bytes",
    "decode_ms",
    "prefill_ms",
    "parameters",
    "flops_per_token",
    "peak_memory_bytes",
]

MEASURED_AFTER_TRAINING: frozenset[str] = frozenset(
    {"recall", "decode_ms", "prefill_ms", "peak_memory_bytes"}
)
"""Metrics that cost a trial; the others are known from the architecture alone."""


class Objective(_Frozen):
    """One axis of the front. `context` (tokens) and `batch` say where it is measured."""

    metric: Metric
    direction: Literal["minimize", "maximize"]
    context: int | None = None
    batch: int | None = None
    reference: float | None = None
    """Worst value that still counts for the hypervolume; derived if not given."""


class Limit(_Frozen):
    """An upper bound; an architecture above it is infeasible. `context` as in Objective."""

    metric: Metric
    maximum: float
    context: int | None = None
    batch: int | None = None


class SearchSpec(_Frozen):
    """How the space is searched. `trials` counts distinct architectures that were evaluated."""

    sampler: Literal["auto", "tpe", "gp", "nsga2", "random"] = "auto"
    trials: int = 32
    time_s: float | None = None
    warm_start: tuple[Literal["smallest", "middle", "largest"], ...] = ()


class ResourcesSpec(_Frozen):
    """What one trial asks of Ray, and how many run at once (None: as many as fit)."""

    gpus: float = 0.0
    cpus: int = 1
    device: str | None = None
    parallel: int | None = None
    trial_timeout_s: float = 3600.0
    attempts: int = 3


class TrackingSpec(_Frozen):
    """Where results go: SQLAlchemy URL, MLflow tracking URI, folder of trained weights."""

    storage: str = "sqlite:///archsearch.db"
    mlflow: str | None = "sqlite:///mlflow.db"
    weights: str = "archsearch-weights"


class StudySpec(_Frozen):
    """A whole study."""

    study: str
    seed: int = 0
    plugins: tuple[str, ...] = ()
    model: ModelSpec
    task: MqarSpec
    train: TrainSpec
    objectives: tuple[Objective, ...]
    limits: tuple[Limit, ...] = ()
    search: SearchSpec = SearchSpec()
    resources: ResourcesSpec = ResourcesSpec()
    tracking: TrackingSpec = TrackingSpec()

    @cached_property
    def identity(self) -> str:
        """Hash of what may not change when a study goes on: space, task, training, objectives,
        limits, seed and sampler. Budgets, resources and places may."""
        fixed = self.model_dump(
            mode="json",
            include={"seed", "model", "task", "train", "objectives", "limits"},
        )
        fixed["sampler"] = self.search.sampler
        fixed["warm_start"] = list(self.search.warm_start)
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]
