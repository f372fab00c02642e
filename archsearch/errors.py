"""What can go wrong, by who can mend it.

Every error a user can cause or fix is an `ArchsearchError`; its text says where, what was found and
what would be accepted, and its class fixes the exit code of the command line. `FailureClass` is the
taxonomy of trials that end without a result. A bug of ours is an `assert` or any other exception.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

EXIT_NOTHING_COMPLETE = 5
"""A study that ended without a complete trial."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C, or as if by it."""
EXIT_OUTPUT_CLOSED = 141
"""Nobody reads the output any more: 128 and the number of SIGPIPE, as shells count.

Every other exit code belongs to a class of errors below."""

FOREIGN_FAULTS: tuple[type[BaseException], ...] = (Exception, SystemExit)
"""What a mixer's code may raise without ending the process that calls it: all but Ctrl-C."""


class FailureClass(StrEnum):
    """Why a trial has no result. The coordinator decides on a retry by this class alone."""

    INFEASIBLE = "infeasible"
    """A limit or a mixer's own rule excludes the architecture; nothing was trained."""
    DIVERGED = "diverged"
    """Every member of the population reached a non-finite loss."""
    OUT_OF_MEMORY = "out_of_memory"
    """Host or device memory ran out."""
    TIMED_OUT = "timed_out"
    """The trial passed its deadline and was stopped."""
    LOST = "lost"
    """The worker, its node or the coordinator went away. Retried elsewhere."""
    PLUGIN_ERROR = "plugin_error"
    """A mixer raised, or returned something its contract forbids."""
    KERNEL_REFUSED = "kernel_refused"
    """A kernel backend failed its comparison with the reference on this device."""

    @property
    def is_retried(self) -> bool:
        """True for failures that say nothing about the architecture."""
        return self is FailureClass.LOST


class ArchsearchError(Exception):
    """Base of every error with a message meant for the user."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a study file: 1-based line and column, dotted path, and a sentence.

    Line 0 stands for the file as a whole.
    """

    line: int
    column: int
    path: str
    message: str


class SpecError(ArchsearchError):
    """A study file that cannot be accepted. Carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(f"{_where(source, p)}: {p.path}: {p.message}" for p in self.problems)
        )


def _where(source: str, problem: Problem) -> str:
    return f"{source}:{problem.line}:{problem.column}" if problem.line else source


class UsageError(ArchsearchError):
    """A command-line argument, trial number or study name that names nothing."""

    exit_code = 2


class PluginError(ArchsearchError):
    """A mixer that is unknown, defined twice, or does not keep its contract."""

    exit_code = 2


class InfeasibleError(ArchsearchError):
    """An architecture that a mixer's own rules or the study's limits exclude."""

    exit_code = 2


class DivergedError(ArchsearchError):
    """Every member of a population reached a loss that is not finite."""


class KernelRefusedError(ArchsearchError):
    """A kernel backend that does not exist, or whose numbers differ from the reference here."""

    exit_code = 2


class StudyRefusedError(ArchsearchError):
    """A study that another coordinator holds, or whose stored search space is a different one."""

    exit_code = 3


class ServiceError(ArchsearchError):
    """Ray, the database or the tracking server cannot be reached or cannot do what was asked."""

    exit_code = 4


def nearest(name: object, accepted: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest accepted name, or an empty string."""
    close = difflib.get_close_matches(str(name), list(accepted), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
