"""Definition of the head's cross-entropy and hits: all logits at once, and ordinary autograd.

Shape suffixes: M members, N labelled rows, D width, V vocabulary.
"""

from torch import Tensor

from archsearch_kernels.precision import accumulator


def head_loss(
    hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor, weights_N: Tensor | None
) -> Tensor:
    """See `archsearch_kernels.head_loss.head_loss`."""
    logits_MNV = _logits(hidden_MND, head_MVD)
    at_MN1 = labels_N.expand(logits_MNV.shape[0], -1).unsqueeze(-1)
    label_MN = logits_MNV.gather(-1, at_MN1).squeeze(-1)
    loss_MN = logits_MNV.logsumexp(-1) - label_MN
    if weights_N is None:
        return loss_MN.mean(1)
    return (loss_MN * weights_N.to(loss_MN.dtype)).sum(1)


def hits(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor) -> Tensor:
    """See `archsearch_kernels.head_loss.hits`."""
    return (_logits(hidden_MND, head_MVD).argmax(-1) == labels_N).sum(1)


def _logits(hidden_MND: Tensor, head_MVD: Tensor) -> Tensor:
    compute = accumulator(hidden_MND.dtype)
    return hidden_MND.to(compute) @ head_MVD.to(compute).mT
