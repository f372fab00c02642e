"""A loss added from inside a module, so that no caller has to know of it.

The tensor it rides on is unchanged; a backward pass through that tensor also differentiates the
loss, once, with factor 1, whatever the gradient that arrives.
"""

from typing import Any

import torch
from torch import Tensor


def add_loss(carrier: Tensor, loss: Tensor) -> Tensor:
    """Return `carrier`; its backward pass adds the gradient of the scalar `loss`.

    Under `torch.func.vmap` each member of a population adds its own.
    """
    y: Tensor = _AddedLoss.apply(carrier, loss)  # type: ignore[no-untyped-call]
    return y


class _AddedLoss(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad_outputs[0], torch.ones_like(loss)
