"""AdamW for a population: one flat buffer, one learning rate a member, nothing read back.

The update is Loshchilov and Hutter's (arXiv:1711.05101) as `torch.optim.AdamW` computes it, on
every parameter, norms and biases included. What changes with the step (schedule, bias corrections)
is looked up in a table on the device, by a step counter on the device, so that a captured step
needs no new capture. Knows nothing of models.

Shape suffixes: M members, P parameters of one member, S steps.
"""

import math

import torch
from torch import Tensor

from archsearch.spec import TrainSpec

_EPS = 1e-8
_CLIP_EPS = 1e-6


def rate_factor(train: TrainSpec, step: int, steps_per_epoch: int) -> float:
    """What the learning rate is multiplied by at a step (from 0): schedule times warm-up.

    The cosine falls from 1 to 0 over training, as `CosineAnnealingLR` with eta_min 0 does.
    """
    epoch = step // steps_per_epoch
    progress = {
        "constant": 0.0,
        "cosine_per_epoch": epoch / train.epochs,
        "cosine_per_step": step / (train.epochs * steps_per_epoch),
    }[train.schedule]
    warm = min(1.0, (step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
    return warm * (1 + math.cos(math.pi * progress)) / 2


class FlatAdamW:
    """Updates flat_MP in place.

    Args:
        flat_MP: master parameters, fp32 (fp64 in tests).
        rates: learning rate of each member.
        compiles: whether the update is compiled, which fuses it to one pass over the buffers.
    """

    def __init__(
        self,
        flat_MP: Tensor,
        rates: tuple[float, ...],
        train: TrainSpec,
        steps_per_epoch: int,
        compiles: bool = False,
    ) -> None:
        self.flat_MP = flat_MP
        self.grad_MP = torch.zeros_like(flat_MP)
        self.mean_MP = torch.zeros_like(flat_MP)
        self.square_MP = torch.zeros_like(flat_MP)
        self.betas = train.betas
        self.weight_decay = train.weight_decay
        self.grad_clip = train.grad_clip
        self.rate_M1 = flat_MP.new_tensor(rates).unsqueeze(1)
        first, second = self.betas
        self.table_S3 = flat_MP.new_tensor(
            [
                (
                    rate_factor(train, step, steps_per_epoch),
                    1 - first ** (step + 1),
                    math.sqrt(1 - second ** (step + 1)),
                )
                for step in range(train.epochs * steps_per_epoch)
            ]
        )
        self.step = torch.zeros(1, dtype=torch.int64, device=flat_MP.device)
        plain = self._update
        self._launch = torch.compile(plain, fullgraph=True, dynamic=False) if compiles else plain

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything that an update changes and the next one needs."""
        return {
            "parameters": self.flat_MP,
            "mean": self.mean_MP,
            "square": self.square_MP,
            "step": self.step,
        }

    @torch.no_grad()
    def update(self, alive_M: Tensor) -> None:
        """Apply grad_MP, which is spent. Members that are not alive stay exactly as they are."""
        self._launch(alive_M)

    def _update(self, alive_M: Tensor) -> None:
        factor, mean_bias, square_bias = self.table_S3.index_select(0, self.step)[0].unbind()
        dead_M1 = ~alive_M.unsqueeze(1)
        rate_M1 = (self.rate_M1 * factor).masked_fill(dead_M1, 0.0)
        grad = self.grad_MP.masked_fill_(dead_M1, 0.0)
        if self.grad_clip is not None:
            norm_M1 = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
            grad.mul_((self.grad_clip / (norm_M1 + _CLIP_EPS)).clamp(max=1.0))
        first, second = self.betas
        self.mean_MP.lerp_(grad, 1 - first)
        self.square_MP.mul_(second).addcmul_(grad, grad, value=1 - second)
        size = (self.square_MP.sqrt() / square_bias).add_(_EPS)
        self.flat_MP.mul_(1 - rate_M1 * self.weight_decay)
        move = torch.div(self.mean_MP, size, out=size).mul_(-rate_M1 / mean_bias)
        self.flat_MP.add_(move.masked_fill_(dead_M1, 0.0))
        self.step.add_(1)
