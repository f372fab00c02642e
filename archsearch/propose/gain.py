"""Expected gain in hypervolume where some costs are known and the others are normally distributed.

The box between the best costs and the reference point is filled with points of a low-discrepancy
sequence. A candidate gains a point that nothing told dominates yet with the probability that it
dominates it: for independent costs the product of one probability an axis, which is 0 or 1 for a
known one. So the mean over the points is the expected improvement of Emmerich et al. (2006), for
any number of objectives, without a sum over cells. Everything is minimised.

Shape suffixes: Q candidates, S points of the box, A axes, P points of the front.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_POINTS = 1024


@dataclass(frozen=True)
class Axis:
    """One objective, as costs: its box, and what is known of the candidates."""

    best: float
    worst: float
    mean: Tensor
    deviation: Tensor | None
    """None: the means are exact."""

    def first(self, count: int) -> "Axis":
        """The same for the first candidates alone."""
        deviation_Q = None if self.deviation is None else self.deviation[:count]
        return Axis(self.best, self.worst, self.mean[:count], deviation_Q)


def expected_gain(axes: Sequence[Axis], front: Sequence[Sequence[float]], seed: int) -> Tensor:
    """Share of the box that each candidate is expected to add to what the front dominates."""
    engine = torch.quasirandom.SobolEngine(len(axes), scramble=True, seed=seed)
    unit_SA = engine.draw(_POINTS, dtype=torch.float64)
    low_A = torch.tensor([axis.best for axis in axes], dtype=torch.float64)
    high_A = torch.tensor([axis.worst for axis in axes], dtype=torch.float64)
    box_SA = low_A + (high_A - low_A) * unit_SA
    if front:
        front_PA = torch.tensor(front, dtype=torch.float64)
        box_SA = box_SA[~(front_PA[:, None] <= box_SA[None]).all(dim=2).any(dim=0)]
    reached_QS = torch.ones(len(axes[0].mean), len(box_SA), dtype=torch.float64)
    for axis, box_S in zip(axes, box_SA.T, strict=True):
        over_QS = box_S[None] - axis.mean[:, None]
        if axis.deviation is None:
            reached_QS *= over_QS >= 0
        else:
            reached_QS *= torch.special.ndtr(over_QS / axis.deviation[:, None])
    share_Q: Tensor = reached_QS.sum(dim=1) / _POINTS
    return share_Q


def chance_below(limit: float, mean_Q: Tensor, deviation_Q: Tensor) -> Tensor:
    """Probability that each of some normally distributed numbers is at most `limit`."""
    chance_Q: Tensor = torch.special.ndtr((limit - mean_Q) / deviation_Q)
    return chance_Q
