"""What the coordinator hears of its attempts, each named by its token, and of their machines."""

from dataclasses import dataclass

from archsearch.errors import FailureClass
from archsearch.messages import Event


@dataclass(frozen=True)
class Up:
    """A worker took the attempt; its clock starts now."""

    token: str


@dataclass(frozen=True)
class Alive:
    """The worker of an attempt lives, whatever the trial does."""

    token: str


@dataclass(frozen=True)
class Answer:
    """One event of a trial."""

    token: str
    event: Event


@dataclass(frozen=True)
class Gone:
    """The attempt ended without a last word of the trial itself."""

    token: str
    failure: FailureClass
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Returned:
    """The attempt ended before its trial began, and counts as none."""

    token: str
    message: str


@dataclass(frozen=True)
class News:
    """A sentence about the machines of the cluster."""

    text: str


Arrival = Up | Alive | Answer | Gone | Returned | News
