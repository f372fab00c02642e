"""StudySpec: a study after reading, in its one normal form. Plain data, JSON in and out.

Everything optional in the YAML is filled in here: recipes are spelled out, every searched field
lists its candidates, every objective its context and batch. `study_file` turns YAML into this;
workers and the database hold its JSON. Knows nothing of YAML, line numbers or Optuna.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from archsearch.model_spec import Frozen, ModelSpec

Prompt = Literal["plain", "twice", "question_first"]
"""What comes before the queries: the context, the context twice, or the question and it."""


Execution = Literal["eager", "captured", "compiled"]
"""How steps are launched: one kernel after the other, from a CUDA graph, or compiled as well."""


class Segment(Frozen):
    """`examples` sequences of `length` tokens holding `pairs` key-value pairs.

    `length` is that of the plain prompt; another prompt puts tokens before it.
    """

    length: int
    pairs: int
    examples: int

    @property
    def name(self) -> str:
        """Key of a segment in results, such as `L256K64`."""
        return f"L{self.length}K{self.pairs}"


class MqarSpec(Frozen):
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
    prompt: Prompt = Field(default="plain", exclude_if=lambda prompt: prompt == "plain")

    @property
    def longest(self) -> int:
        """Length of the longest test sequence, in tokens; the default context of objectives."""
        return max(self.length_of(segment) for segment in self.test)

    def length_of(self, segment: Segment) -> int:
        """Tokens of a sequence of a segment under this prompt."""
        added = {"plain": 0, "twice": 2 * segment.pairs, "question_first": segment.pairs}
        return segment.length + added[self.prompt]

    def prefix_of(self, segment: Segment) -> int:
        """Tokens of a sequence of a segment before the first place where a query may stand."""
        return self.length_of(segment) - segment.length + 2 * segment.pairs


class JustReadTwice(Frozen):
    """Next-token loss behind a prefix and masked-token loss in it; see `just_read_twice`.

    `prefix` is in tokens; if it is None, it is what a sequence shows before its queries.
    """

    mask_share: float = 0.15
    mask_weight: float = 0.25
    prefix: int | None = None


class TrainSpec(Frozen):
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
    data: Literal["fixed", "fresh"] = Field(
        default="fixed", exclude_if=lambda data: data == "fixed"
    )
    """Examples of an epoch: always the same, or drawn anew for each."""
    objective: JustReadTwice | None = Field(default=None, exclude_if=lambda given: given is None)
    """What training minimises; None: the next-token loss at the labelled positions alone."""

    @property
    def population(self) -> int:
        return len(self.learning_rates) * self.seeds

    @property
    def member_rates(self) -> tuple[float, ...]:
        """Learning rate of every member of the population: each rate once for every seed."""
        return tuple(rate for rate in self.learning_rates for _ in range(self.seeds))


def model_vocab_size(task: MqarSpec, train: TrainSpec) -> int:
    """Tokens that a model knows: those of the task and, last, [MASK] if training masks."""
    return task.vocab_size + (train.objective is not None)


Metric = Literal[
    "recall",
    "state_bytes",
    "decode_ms",
    "prefill_ms",
    "parameters",
    "flops_per_token",
    "peak_memory_bytes",
]

PLACED: Mapping[str, tuple[Literal["context", "batch"], ...]] = {
    "recall": (),
    "state_bytes": ("context",),
    "decode_ms": ("context", "batch"),
    "prefill_ms": ("context", "batch"),
    "parameters": (),
    "flops_per_token": ("context",),
    "peak_memory_bytes": ("context", "batch"),
}
"""Every metric, and what says where it is measured."""

KNOWN_BEFORE_TRAINING: tuple[Metric, ...] = ("state_bytes", "parameters", "flops_per_token")
"""Metrics that the architecture alone decides."""

MEASURED_AFTER_TRAINING = frozenset(PLACED) - frozenset(KNOWN_BEFORE_TRAINING)
"""Metrics that cost a trial."""


class Objective(Frozen):
    """One axis of the front. `context` (tokens) and `batch` say where it is measured."""

    metric: Metric
    direction: Literal["minimize", "maximize"]
    context: int | None = None
    batch: int | None = None
    reference: float | None = None
    """Worst value that still counts for the hypervolume; derived if not given."""


class Limit(Frozen):
    """An upper bound; an architecture above it is infeasible. `context` as in Objective."""

    metric: Metric
    maximum: float
    context: int | None = None
    batch: int | None = None


CORNERS = ("smallest", "middle", "largest")
"""Places of the space, by state bytes, that a search can begin with."""


class StudyStart(Frozen):
    """Trials of another study in the same database, to begin a search with."""

    study: str
    trials: tuple[int, ...] = ()
    """Numbers; empty for its front."""


class EarlyStopping(Frozen):
    """Which trials are stopped before their training ends; see `stopping`."""

    reduction: float = Field(default=3.0, gt=1)
    """One in so many goes on from a rung that decides."""
    grace: float = Field(default=0.25, ge=0, lt=1)
    """Share of the training before which no trial is stopped."""


class SearchSpec(Frozen):
    """How the space is searched. `trials` counts distinct architectures that were evaluated."""

    sampler: Literal["auto", "evolution", "tpe", "gp", "nsga2", "random"] = "auto"
    trials: int = 32
    time_s: float | None = None
    device_time_s: float | None = None
    """Seconds of all trials together, times what each asks for: GPUs, or CPU cores if no GPU."""
    failures: int | None = None
    """Failed trials that end the study."""
    warm_start: tuple[str | StudyStart, ...] = ()
    """Corners of the space, published architectures, trials of other studies; these projected."""
    early_stopping: EarlyStopping | None = Field(default=None, exclude_if=lambda rule: rule is None)
    """None: every trial trains to its end."""
    confirm: int = 0
    """Fresh seeds that members of the front are trained with once the search is over."""


class ResourcesSpec(Frozen):
    """What one trial asks of Ray, and how many run at once (None: as many as fit)."""

    gpus: float = 0.0
    cpus: int = 1
    device: str | None = None
    parallel: int | None = None
    trial_timeout_s: float = 3600.0
    attempts: int = 3
    execution: Execution | None = None
    """How a population's steps are launched; None: compiled on CUDA, eager on a CPU."""

    @property
    def devices(self) -> float:
        """What one trial keeps busy: GPUs (or a part of one); CPU cores if it asks for no GPU."""
        return self.gpus or float(self.cpus)


class TrackingSpec(Frozen):
    """Where results go: SQLAlchemy URL, MLflow tracking URI, folder of trained weights."""

    storage: str = "sqlite:///archsearch.db"
    mlflow: str | None = "sqlite:///mlflow.db"
    weights: str = "archsearch-weights"


Place = tuple[int, int]
"""(batch, context)"""

_FIXED = ("seed", "model", "task", "train", "objectives", "limits")
_FIXED_OF_SEARCH = ("sampler", "warm_start", "early_stopping")


class StudySpec(Frozen):
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

    @property
    def fixed(self) -> dict[str, Any]:
        """What may not change when a study goes on, as plain values by name.

        Budgets, resources and the places of results may.
        """
        plain = self.model_dump(mode="json")
        parts = {name: plain[name] for name in _FIXED}
        return parts | {f"search.{name}": plain["search"].get(name) for name in _FIXED_OF_SEARCH}

    @property
    def identity(self) -> str:
        """Hash of what is fixed, without the parts that are left at None."""
        given = {name: value for name, value in self.fixed.items() if value is not None}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def vocab_size(self) -> int:
        """Of the models, as in `model_vocab_size`."""
        return model_vocab_size(self.task, self.train)

    @property
    def axes(self) -> tuple[Objective | Limit, ...]:
        """The objectives, then the limits."""
        return (*self.objectives, *self.limits)

    @property
    def latencies(self) -> tuple[str, ...]:
        """Which latencies are among the axes."""
        return tuple(sorted({axis.metric for axis in self.axes} & {"prefill_ms", "decode_ms"}))

    def place_of(self, axis: Objective | Limit) -> Place:
        """Where an objective or a limit is measured."""
        return axis.batch or 1, axis.context or self.task.longest

    def place(self, metric: str) -> Place:
        """Where a metric is recorded: where the first objective, else limit, of it says.

        Batch 1 and the task's longest sequence if there is none.
        """
        axis = next((axis for axis in self.axes if axis.metric == metric), None)
        return self.place_of(axis) if axis is not None else (1, self.task.longest)
