"""Runs the head's Triton programs in Triton's interpreter, so that tests need no GPU.

    TRITON_INTERPRET=1 python interpreter.py CALLS RESULTS

Triton reads that variable when it is imported, hence a process of its own. CALLS is a file of
torch.save: a list of calls, each a dict with the tensors and how the programs are to be cut.
RESULTS gets a list of dicts of tensors. What is planted changes a constant of the programs.
"""

import sys
from typing import Any

import torch
from archsearch_kernels.head_loss import head_loss, hits, triton, triton_programs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


def results(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor | None, d_loss: Tensor
) -> tuple[Tensor, ...]:
    """Loss, hits and gradients."""
    hidden, head = (x.detach().requires_grad_() for x in (hidden, head))
    loss = head_loss(hidden, head, labels_N=labels, weights_N=weights, backend="triton")
    found = hits(hidden.detach(), head.detach(), labels, backend="triton")
    return loss.detach(), found, *torch.autograd.grad(loss, (hidden, head), d_loss.to(loss))


def run(call: dict[str, Any]) -> dict[str, Tensor]:
    """The results of one call by their names."""
    size = triton.Blocks(*call["blocks"], warps=4, stages=1, resident=1)
    triton._SINGLE = size
    for table in (triton.FORWARD, triton.BACKWARD):
        table.update(dict.fromkeys(table, size))
    triton._PROCESSORS = call["processors"]
    for name, value in call["planted"].items():
        setattr(triton_programs, name, value)
    inputs = [call[name] for name in ("hidden", "head", "labels", "weights", "d_loss")]
    function = make_fx(results, tracing_mode="fake")(*inputs) if call["traced"] else results
    return dict(zip(("loss", "hits", "d_hidden", "d_head"), function(*inputs), strict=True))


def main() -> None:
    calls, found = sys.argv[1:]
    torch.save([run(call) for call in torch.load(calls)], found)


if __name__ == "__main__":
    main()
