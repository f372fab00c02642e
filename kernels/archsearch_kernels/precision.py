"""The dtype that kernels accumulate in: fp64 for fp64 inputs (tests), fp32 for everything else."""

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, states and denominators for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
