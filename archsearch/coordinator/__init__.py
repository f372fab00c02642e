"""The coordinator: the one process that proposes, submits and writes while a study runs.

`run` wires it up; `loop` moves; `book` is the picture in memory and the rule of what is told when;
`nexts` decides what is proposed, `peers` what a trial is held against, `confirming` what is trained
again in the end; `desk` writes down; `repair` takes an interrupted study up again.
"""

from archsearch.coordinator.run import run_study

__all__ = ["run_study"]
