"""The training objective of "Just read twice" (Arora et al., arXiv:2407.05483), on one batch.

A sequence is a prefix, which a model may read as a whole, and what follows it. In the prefix each
token is replaced by [MASK] with probability `mask_share`, and the model says at that place which
token stood there; behind the prefix it predicts as always, here the values at the queries:

    loss = mean over labels at or behind the prefix of -log p(label)
         + mask_weight * mean over masked places of -log p(token that stood there)

Each term is divided by the number of its own targets in the batch, and is 0 if it has none: the
balance of the two depends on no count, and a batch without a masked token is no 0 / 0. The code of
the authors (HazyResearch/prefix-linear-attention, `train/src/tasks/seq.py`) leaves that to its loss
function and filters the targets by `y > 0`, which also drops masked places where token 0 stood;
here every masked place counts. As there, the sum is not divided by 1 + mask_weight, a constant that
AdamW cancels unless gradients are clipped; [MASK] always replaces the token, never a random one;
and what is masked is missing for the labels behind the prefix too.

[MASK] is one more token, after those of the task. Nothing is masked in evaluation. Any mixer can be
trained so: a causal one predicts a masked token from what came before it.

Shape suffixes: B batch, T tokens, K labelled positions, P tokens of the prefix, R = K + P asked
positions of a sequence, N = B R.
"""

from typing import NamedTuple

import torch
from archsearch_kernels.dropout import struck
from torch import Tensor

from archsearch.spec import JustReadTwice


class Asked(NamedTuple):
    """What one step of training asks of a model.

    Attributes:
        tokens: int64 [B, T].
        at: int64 [B, R], the places that are asked for.
        labels: int64 [N], what is right there, one sequence after the other.
        weights: fp64 [N], what each counts; None if the loss is the mean over all of them.
    """

    tokens: Tensor
    at: Tensor
    labels: Tensor
    weights: Tensor | None


def just_read_twice(
    objective: JustReadTwice,
    tokens_BT: Tensor,
    at_BK: Tensor,
    labels_BK: Tensor,
    prefix: int,
    mask_token: int,
    key: Tensor,
) -> Asked:
    """Mask a batch and ask for what is masked beside what is labelled.

    Which places are masked is a pure function of the key and of the position in the batch, and the
    shapes do not depend on it: every place of the prefix is asked for, those not masked at weight
    0, so that a captured step can be replayed.

    Args:
        prefix: that of the batch, if the objective names none.
        key: int64 [1], on the device of the tokens.
    """
    length = min(prefix if objective.prefix is None else objective.prefix, tokens_BT.shape[1])
    prefix_BP, rest_BT = tokens_BT[:, :length], tokens_BT[:, length:]
    masked_BP = struck(prefix_BP, objective.mask_share, key)
    at_BP = torch.arange(length, device=tokens_BT.device).expand_as(prefix_BP)
    weights = (_mean_of(at_BK >= length), objective.mask_weight * _mean_of(masked_BP))
    return Asked(
        torch.cat((prefix_BP.masked_fill(masked_BP, mask_token), rest_BT), dim=1),
        torch.cat((at_BK, at_BP), dim=1),
        torch.cat((labels_BK, prefix_BP), dim=1).flatten(),
        torch.cat(weights, dim=1).flatten(),
    )


def _mean_of(counted: Tensor) -> Tensor:
    """Weights that sum to the mean over the True places; fp64, for losses of any precision."""
    return counted.double() / counted.sum().clamp(min=1)
