"""Proposing architectures: Optuna's samplers, its tables as a view, corners of the space.

The one place that knows Optuna. `sampler` proposes from an in-memory study rebuilt from our
records, `mirror` shows every trial in Optuna's own tables, `told` checks what either is told,
`corners` finds architectures without a sampler.
"""
