"""Runs the short convolution's Triton programs in Triton's interpreter, so that tests need no GPU.

    TRITON_INTERPRET=1 python short_conv_interpreter.py CALLS RESULTS

Triton reads that variable when it is imported, hence a process of its own. CALLS is a file of
torch.save: a list of dicts, each with the name of a function here and what it is given. RESULTS
gets a list of what they returned.
"""

import sys
from typing import Any

import torch
from archsearch_kernels.short_conv import short_conv
from archsearch_kernels.short_conv import triton as ops
from torch import Tensor
from torch.func import vmap

Named = dict[str, Tensor]


def results(
    tensors: Named, weights: Named, options: dict[str, Any], cuts: tuple[int, int], planted: bool
) -> Named:
    """y, the next tail, and the gradient of every tensor for given gradients of both.

    Args:
        cuts: programs that fill a card, and the fewest tokens of a part.
        planted: whether the sigmoid of the programs is off by 1 %.
    """
    ops._PROGRAMS, ops._SHORTEST = cuts
    right = ops.triton_programs.tl.sigmoid
    if planted:
        ops.triton_programs.tl.sigmoid = lambda x: right(x) * 1.01
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    y, tail = short_conv(**leaves, **options, backend="triton")
    gradients = torch.autograd.grad(
        (y, tail), list(leaves.values()), (weights["y"], weights["tail"])
    )
    ops.triton_programs.tl.sigmoid = right
    named = {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"y": y.detach(), "tail": tail.detach()} | named


def mapped(tensors: Named, in_dims: dict[str, int | None]) -> Named:
    """All members at once, ordinary backward; and each alone. Counts the launches of each way."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}

    def member(given: Named) -> Tensor:
        return short_conv(**given, silu=True, residual=True, backend="triton")[0]

    def one(m: int) -> Tensor:
        return member(
            {
                n: x if in_dims[n] is None else x.select(in_dims[n] or 0, m)
                for n, x in leaves.items()
            }
        )

    found: Named = {}
    ways = {
        "together": lambda: vmap(member, in_dims=(in_dims,))(leaves),
        "apart": lambda: torch.stack([one(m) for m in range(3)]),
    }
    for name, way in ways.items():
        launches = launched(way)
        y = way()
        gradients = torch.autograd.grad(y.square().sum(), list(leaves.values()))
        found |= {f"{name} {i}": x.detach() for i, x in enumerate((y, *gradients))}
        found[f"{name} launches"] = torch.tensor(launches)
    return found


def launched(call: Any) -> int:
    """How often the forward op runs, below whatever is mapped."""
    count, right = 0, ops.triton_programs.forward

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            nonlocal count
            count += 1
            return right[grid]

    ops.triton_programs.forward = Counted()
    try:
        call()
    finally:
        ops.triton_programs.forward = right
    return count


def opcheck(tensors: Named) -> Named:
    """torch's own check of each op: schema, fake, autograd, traced."""
    x, gate, weight, bias, tail = (
        tensors[name] for name in ("x_BTC", "gate_BTC", "weight_CJ", "bias_C", "tail_BPC")
    )
    for given in ((x, weight[None], bias[None], gate, tail), (x, weight[None], None, None, None)):
        leaves = [None if one is None else one.detach().requires_grad_() for one in given]
        torch.library.opcheck(ops.forward, (*leaves, True, True))
        torch.library.opcheck(ops.backward, (*given, gate, True, False))
    return {}


def main() -> None:
    calls, found = sys.argv[1:]
    torch.save([globals()[call.pop("run")](**call) for call in torch.load(calls)], found)


if __name__ == "__main__":
    main()
