"""Head and cross-entropy of all members of a population at once, and what they get right.

    logit_mnv = h_mn . E_mv
    loss_m    = sum_n w_n (log sum_v exp(logit_mnv) - logit_mn,y_n)

Member m has hidden vectors h at N labelled rows and a head E over V tokens, which is its embedding
where the head is tied. The labels y are the same for all members. Without weights each row counts
1 / N. With p the softmax over v, the gradients are

    d loss_m / d h_mn = w_n (sum_v p_mnv E_mv - E_m,y_n)
    d loss_m / d E_mv = sum_n w_n (p_mnv - [v = y_n]) h_mn

so that a backend may drop the logits as soon as they are used: for 16 members, 16,384 rows and
8,192 tokens they would be 8.6 GB in fp32. The forward pass of `triton` is one pass over the
vocabulary that keeps a running maximum, as attention does with E as keys and values (Dao et al.,
arXiv:2205.14135), and has d loss / d h at its end; its backward pass makes the logits again. Sums
have a fixed order, so that a call repeats bit by bit.

`hits` counts the rows whose highest logit is the label's. Of equal logits the first is the highest.

Shape suffixes: M members, N labelled rows, D width, V vocabulary.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes, resolve

WIDEST_TRITON = 256
"""Largest width whose blocks fit a multiprocessor in the backend `triton`."""


def head_loss(
    hidden_MND: Tensor,
    head_MVD: Tensor,
    *,
    labels_N: Tensor,
    weights_N: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Mean cross-entropy of each member over its rows: loss_M, fp32 (fp64 for fp64 inputs).

    Args:
        hidden_MND, head_MVD: one floating dtype; `triton` takes no fp64 and D up to 256.
        labels_N: int64 in [0, V).
        weights_N: what each row counts, for a weighted sum in place of the mean. No gradient.
        backend: `reference`, `blocked` or `triton` (on CUDA).

    Raises:
        LookupError: no such backend.
    """
    loss_M: Tensor = FAMILY.load(backend)(hidden_MND, head_MVD, labels_N, weights_N)
    return loss_M


def hits(hidden_MND: Tensor, head_MVD: Tensor, labels_N: Tensor, *, backend: str) -> Tensor:
    """Rows of each member where the highest logit is the label's: int64 [M]. No gradient.

    Raises:
        LookupError: no such backend.
    """
    hits_M: Tensor = _HITS.load(backend)(hidden_MND, head_MVD, labels_N)
    return hits_M


def resolve_head(device_type: str, dtype: torch.dtype, width: int) -> str:
    """Return the backend that `auto` means for a head of this width: one that stores no logits."""
    choice = resolve(FAMILY.name, device_type, dtype)
    return "blocked" if choice == "triton" and width > WIDEST_TRITON else choice


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check: `batch` members, a row for each token of each head.

    A state stands for weights, some of them zero. They are of size 1, and so are the gradients
    then, which a mean over many rows makes too small for an error to stand out.
    """
    generator = torch.Generator().manual_seed(sizes.seed)
    M, N, D = sizes.batch, sizes.tokens * sizes.heads, sizes.head_size
    V = 3 * D + 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"hidden_MND": normal(M, N, D), "head_MVD": normal(M, V, D)}
    labels_N = torch.randint(0, V, (N,), generator=generator)
    weights_N = (1 + normal(N)).relu() if sizes.state else None
    return Call(tensors, {"labels_N": labels_N, "weights_N": weights_N})


_BACKENDS = ("reference", "blocked", "triton")
_AUTO = {
    (device, dtype): "blocked"
    for device in ("cpu", "cuda")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
} | {("cuda", dtype): "triton" for dtype in (torch.bfloat16, torch.float16)}

FAMILY = Family(
    name="head_loss",
    op=head_loss,
    backends={name: f"archsearch_kernels.head_loss.{name}:head_loss" for name in _BACKENDS},
    make_inputs=make_inputs,
    auto=_AUTO,
    only_on={"triton": "cuda"},
)
_HITS = Family(
    name=FAMILY.name,
    op=hits,
    backends={name: f"archsearch_kernels.head_loss.{name}:hits" for name in _BACKENDS},
    make_inputs=make_inputs,
    auto=_AUTO,
    only_on=FAMILY.only_on,
)
