"""Counts the floating-point operations of a call as it runs.

Matrix products, convolutions and attention are counted by torch's own counter. Everything else
counts one for each number it reads or makes, which bounds its arithmetic from above.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

_MOVES = frozenset(
    ("scatter", "scatter_", "gather", "index", "copy_", "clone", "_to_copy", "cat", "stack")
)
"""Operations that move numbers and do no arithmetic."""


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call: of its matrix products, and of those with all other arithmetic."""

    products: int
    everything: int


@torch.no_grad()
def count_flops(call: Callable[..., object], *arguments: object) -> FlopCount:
    """Run a call and count it; one multiply-add is 2."""
    with FlopCounterMode(display=False) as products, _Arithmetic() as arithmetic:
        call(*arguments)
    total = products.get_total_flops()
    return FlopCount(total, total + arithmetic.numbers)


class _Arithmetic(TorchDispatchMode):
    """Adds up, for each operation that is no view and no move, its largest tensor's numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _MOVES:
            floats = [
                tensor.numel()
                for tensor in (*args, result)
                if isinstance(tensor, Tensor) and tensor.is_floating_point()
            ]
            self.numbers += max(floats, default=0)
        return result
