"""What the coordinator and its workers say to each other, and what is kept of it. Plain JSON.

A worker gets one `TrialRequest` and answers with a stream of events: `Started`, a `Checked` per
kernel not known to be right there, a `Rung` per evaluation on the selection split, then `Evaluated`
(with trained weights) and `Profiled`; or one `Stopped` after a rung, or one `Failed`. Knows nothing
of Ray, Optuna, MLflow or the database.
"""

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from archsearch import __version__
from archsearch.arch import ArchSpec
from archsearch.errors import FailureClass
from archsearch.spec import (
    EarlyStopping,
    Execution,
    MqarSpec,
    Objective,
    TrainSpec,
    model_vocab_size,
)
from archsearch.stopping import Decision, decide, point_of, quality

Recall = Annotated[float, Field(ge=0, le=1)]
Milliseconds = Annotated[float, Field(ge=0, le=1e12)]
"""Of something measured: thirty years at most."""
Count = Annotated[int, Field(ge=0, lt=2**31)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00]*$")]
"""What a column of the database holds whole."""


class _Message(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )


class PluginFile(_Message):
    """A one-off mixer file of the study, shipped by content. `name` is its mixer's name."""

    name: str
    source: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]


class ProfileSpec(_Message):
    """Where latency and state are measured: tokens of context, sequences per batch."""

    prefill: tuple[tuple[int, int], ...]
    """(batch, context) pairs for prefill_ms."""
    decode: tuple[tuple[int, int], ...]
    """(batch, context) pairs for decode_ms, state and peak memory."""
    exclusive: bool
    """True if nothing else runs on the device meanwhile."""


class Peers(_Message):
    """What early stopping holds a trial against: what its peers were at every rung that decides.

    They are known when the trial is submitted, so its worker decides alone and at once.
    """

    rule: EarlyStopping
    objectives: tuple[Objective, ...]
    known: dict[str, float]
    """Of the trial itself: metrics that its architecture alone decides."""
    points: dict[int, tuple[tuple[float, ...], ...]]
    """Rung -> points of its peers there, as from `stopping.point_of`."""


class TrialRequest(_Message):
    """Everything a worker needs to know of one trial. `token` fences off late answers."""

    study: str
    number: int
    token: str
    arch: ArchSpec
    task: MqarSpec
    train: TrainSpec
    profile: ProfileSpec
    seed: int
    device: Literal["cpu", "cuda"]
    plugins: tuple[PluginFile, ...] = ()
    train_wanted: bool = True
    """False if the evaluation is already known and only the profile is missing."""
    profile_wanted: bool = True
    """False if only the evaluation is."""
    checkpoints: str | None = None
    """Folder for the progress of long trials; used by the machines that see it."""
    execution: Execution | None = None
    """How training steps are launched; None: compiled on CUDA, eager on a CPU."""
    threads: int = 1
    """CPU threads that torch may use; results on the CPU are the same for one number of them."""
    peers: Peers | None = None
    """None if the trial trains to its end."""
    kernels_passed: tuple[str, ...] = ()
    """Keys of the checks of kernels that need not be repeated."""

    def decide(self, rung: "Rung") -> Decision:
        """Whether training goes on after a rung, and why."""
        if self.peers is None:
            return Decision(True, "the study stops no trial early")
        peers, reached = self.peers, quality(self.train.member_rates, rung.selection_recall)
        own = point_of(peers.objectives, reached, peers.known)
        points = peers.points.get(rung.rung, ())
        return decide(peers.rule, rung.rung, self.train.rungs, own, points)

    @property
    def vocab_size(self) -> int:
        """Of the model, as in `model_vocab_size`."""
        return model_vocab_size(self.task, self.train)

    @property
    def code(self) -> str:
        """Package version, and the content of the one-off plugins that the architecture uses."""
        used = [plugin for plugin in self.plugins if plugin.name in self.arch.mixers]
        digests = sorted(plugin.digest for plugin in used)
        return "\n".join((__version__, *digests))

    @property
    def recipe_hash(self) -> str:
        """Key of this trial's evaluation beside the architecture."""
        return recipe_hash(self.task, self.train, self.seed, self.code)

    @property
    def profile_key(self) -> str:
        """Key of this trial's profile beside the architecture and the device model."""
        parts = (
            self.profile.model_dump_json(),
            str(self.vocab_size),
            self.train.precision,
            str(self.threads),
            self.code,
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class MemberResult(_Message):
    """One trained copy: its learning rate, seed, and recall on both splits (0 to 1)."""

    learning_rate: float
    seed: int
    diverged: bool
    train_loss: float | None
    selection_recall: Recall
    report_recall: Recall
    report_by_segment: dict[str, Recall]
    """By name of segment, such as `L256K64`."""


class Rung(_Message):
    """Population state at one evaluation on the selection split. Lists have one entry a member."""

    kind: Literal["rung"] = "rung"
    rung: Count
    step: Count
    epoch: float
    seconds: float
    train_loss: tuple[float | None, ...]
    selection_recall: tuple[Recall, ...]


class Evaluation(_Message):
    """The verdict on one architecture under one recipe.

    The learning rate is chosen on the selection split; `recall` is the mean over its seeds on the
    report split, and `recall_spread` the largest minus the smallest of them.
    """

    arch_hash: str
    recipe_hash: str
    members: tuple[MemberResult, ...]
    rungs: tuple[Rung, ...]
    learning_rate: float
    recall: Recall
    recall_spread: Recall
    recall_by_pairs: dict[int, Recall]
    recall_by_length: dict[int, Recall]
    diverged_members: int
    train_seconds: float
    groups: tuple[int, ...] = ()
    """Sizes of the groups that the members were trained in, one after the other; one if all fitted
    the device together. Empty: not recorded."""
    kernel_backends: dict[str, Name]
    versions: dict[str, Name]

    @property
    def chosen(self) -> tuple[MemberResult, ...]:
        """Members at the chosen learning rate, which `recall` and its spread are taken over.

        One that diverged is among them, with a recall of 0.
        """
        return tuple(one for one in self.members if one.learning_rate == self.learning_rate)


class LatencyPoint(_Message):
    """Median and spread (interquartile range) of one measured latency, milliseconds."""

    batch: int
    context: int
    median_ms: Milliseconds
    iqr_ms: Milliseconds
    repeats: int


class Profile(_Message):
    """Measurements of one architecture on one device model."""

    arch_hash: str
    device_model: Name
    exclusive: bool
    prefill: tuple[LatencyPoint, ...]
    decode: tuple[LatencyPoint, ...]
    state_bytes: dict[int, Bytes]
    """Context length -> bytes really held for one sequence after that many tokens."""
    peak_memory_bytes: Bytes
    threads: int


class Started(_Message):
    """The worker is up: where it runs."""

    kind: Literal["started"] = "started"
    node: Name
    pid: Count
    device_model: Name


_Error = Annotated[float, Field(allow_inf_nan=True)]


class Checked(_Message):
    """A kernel was compared with its reference. Errors are relative; null if they are infinite."""

    kind: Literal["checked"] = "checked"
    key: Annotated[str, Field(pattern=r"^[0-9a-zA-Z]{1,64}$")]
    """Of all that the verdict depends on, as from `kernel_check.check_key`."""
    family: str
    backend: str
    device_model: str
    dtype: str
    ok: bool
    forward_error: _Error | None
    gradient_error: _Error | None
    tolerance: float
    worst: str
    versions: dict[str, str]


class Evaluated(_Message):
    """Training is done. `weights` is a safetensors file of the best member at the chosen rate."""

    kind: Literal["evaluated"] = "evaluated"
    evaluation: Evaluation
    weights: bytes


class Profiled(_Message):
    """Profiling is done; the last event of a trial that went well."""

    kind: Literal["profiled"] = "profiled"
    profile: Profile


class Stopped(_Message):
    """Training ends after this rung, as `TrialRequest.decide` says; the last event."""

    kind: Literal["stopped"] = "stopped"
    rung: Count
    reason: str


class Failed(_Message):
    """The trial ends without a result."""

    kind: Literal["failed"] = "failed"
    failure: FailureClass
    message: str
    traceback: str = ""


Progress = Started | Checked | Rung
"""Events that are no result: what they say is of no use once the attempt is given up."""

Event = Annotated[Progress | Evaluated | Profiled | Stopped | Failed, Field(discriminator="kind")]
_events: TypeAdapter[Event] = TypeAdapter(Event)


def read_event(text: str | bytes) -> Event:
    """Parse one event from its JSON."""
    return _events.validate_json(text)


def read_request(text: str | bytes) -> TrialRequest:
    """Parse a request from its JSON. Its architecture is taken as it is: the mixers of one-off
    plugins are not known to this process before the request is."""
    plain = json.loads(text)
    return TrialRequest.model_validate({**plain, "arch": ArchSpec.from_stored(plain["arch"])})


def recipe_hash(task: MqarSpec, train: TrainSpec, seed: int, code: str) -> str:
    """Key of an evaluation beside the architecture: data, training, seed and code version.

    `code` is the package version plus the digests of the one-off plugin files the architecture
    uses, so that an edited plugin is trained anew.
    """
    text = "\n".join((task.canonical_json, train.canonical_json, str(seed), code))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
