"""Runs the programs of sliding-window attention in Triton's interpreter: tests need no GPU.

    TRITON_INTERPRET=1 python window_interpreter.py CALLS RESULTS

Triton reads that variable when it is imported, hence a process of its own. CALLS is a file of
torch.save: a list of dicts, each with the name of a function here and what it is given. RESULTS
gets a list of what they returned.
"""

import sys

import torch
from archsearch_kernels.sliding_window import backward_programs, forward_programs, sliding_window
from archsearch_kernels.sliding_window import triton as ops
from torch import Tensor
from torch.func import vmap

Named = dict[str, Tensor]


def results(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, window: int, exists: Tensor | None
) -> Named:
    """y, and the gradients of q, k and v."""
    leaves = {"q": q, "k": k, "v": v}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    y = sliding_window(*leaves.values(), window=window, exists_BS=exists, backend="triton")
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    named = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"y": y.detach()} | named


def attention(tensors: Named, window: int, exists: Tensor | None, blocks: tuple[int, int]) -> Named:
    ops._SINGLE = ops.Blocks(*blocks, 4, 1)
    return results(**tensors, window=window, exists=exists)


def planted(
    tensors: Named, window: int, exists: Tensor | None, blocks: tuple[int, int], module: str
) -> Named:
    """With exponentials whose base is off by 1 % in its logarithm."""
    changed = {"forward": forward_programs, "backward": backward_programs}[module]
    right = changed.LOG2E
    changed.LOG2E = right * 1.01
    try:
        return attention(tensors, window, exists, blocks)
    finally:
        changed.LOG2E = right


def opcheck(tensors: Named, exists: Tensor) -> Named:
    """torch's own check of each op: schema, fake, autograd, traced."""
    q, k, v, dy = tensors.values()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for some in (None, exists):
        torch.library.opcheck(ops.forward, (*leaves, some, 5))
        y, log_total = ops.forward(q, k, v, some, 5)
        torch.library.opcheck(ops.backward, (q, k, v, some, y, log_total, dy, 5))
    return {}


def mapped(tensors: Named, exists: Tensor, window: int) -> Named:
    """All members at once, with a mask that they share, and each alone."""
    dy = tensors["dy"]
    stacked = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]

    def member(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliding_window(q, k, v, window=window, exists_BS=exists, backend="triton")

    y = vmap(member)(*stacked)
    apart = torch.stack([member(*(x[m] for x in stacked)) for m in range(len(dy))])
    found = {}
    for name, one in (("together", y), ("apart", apart)):
        gradients = torch.autograd.grad(one, stacked, dy)
        found |= {f"{name} {i}": x.detach() for i, x in enumerate((one, *gradients))}
    return found


def main() -> None:
    calls, found = sys.argv[1:]
    torch.save([globals()[call.pop("run")](**call) for call in torch.load(calls)], found)


if __name__ == "__main__":
    main()
