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

from archsearch.mixer import Mixer, State

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


def decoding_flops(module: Mixer, length: int) -> tuple[float, float]:
    """FLOPs per token of a sequence: of matrix products, and of those with all other arithmetic.

    What the mixer reads together is counted in one call, and every token behind it in a step at its
    own length of context, so that a cache is read exactly as far as it is filled.
    """

    def empty(context: int) -> State:
        return module.init_state(1, context, torch.float32, "cpu")

    width = module.config.d_model
    together, counts = min(module.config.prefix_len, length), []
    if together:
        counts.append(count_flops(module.mix, torch.zeros(1, together, width), empty(length)))
    for context in range(together + 1, length + 1):
        counts.append(count_flops(module.step, torch.zeros(1, width), empty(context)))
    products, everything = (
        sum(numbers) for numbers in zip(*((c.products, c.everything) for c in counts), strict=True)
    )
    return products / length, everything / length


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
