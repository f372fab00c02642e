"""The cheap gate before training: what an architecture costs, and why a study excludes it.

Mixers are other people's code and run here, in the coordinator, before any worker sees them. So
whatever they raise is caught in this one place and becomes the trial's failure, not the study's.
"""

import traceback
from dataclasses import dataclass, field

from archsearch.arch import ArchSpec
from archsearch.cost import known_metrics, too_large, violations
from archsearch.errors import FOREIGN_FAULTS
from archsearch.measures import RULES, constraints
from archsearch.spec import StudySpec


@dataclass(frozen=True)
class Gate:
    """What is known of an architecture without running it."""

    violations: tuple[str, ...] = ()
    """Why the study excludes it; empty if it does not."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Empty if the mixers' own rules exclude it."""
    constraints: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """One line if a mixer's code failed; nothing else is known then."""
    traceback: str = ""

    @property
    def is_open(self) -> bool:
        return not self.violations and not self.error


def gate(arch: ArchSpec, spec: StudySpec) -> Gate:
    """Look at an architecture. Never raises for what a mixer's code does."""
    try:
        found = violations(arch, spec)
        signs = constraints(spec, arch, None)
        metrics = {} if signs[RULES] > 0 else known_metrics(arch, spec)
        large = too_large(metrics)
        signs = {**signs, RULES: 1.0} if large else signs
        return Gate(violations=(*found, *large), metrics=metrics, constraints=signs)
    except FOREIGN_FAULTS as error:
        text = "".join(traceback.format_exception(error))
        return Gate(error=f"{type(error).__name__}: {error}", traceback=text)


def is_excluded(arch: ArchSpec, spec: StudySpec) -> bool:
    """True if the study or a mixer's rules exclude an architecture; quicker than the whole gate."""
    try:
        return bool(violations(arch, spec))
    except FOREIGN_FAULTS:
        return False  # its trial will say what is wrong
