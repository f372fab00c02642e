"""Add to the residual stream, and norm the sum: what stands between two mixers.

    s_n = r_n + y_n
    layer norm:  x_n = (s_n - mean s_n) / sqrt(var s_n + epsilon) * weight + bias
    rms norm:    x_n = s_n / sqrt(mean s_n^2 + epsilon) * weight            (no bias)

Layer norm is Ba et al.'s (arXiv:1607.06450), RMS norm Zhang and Sennrich's (arXiv:1910.07467). Both
s and x are results. `triton` reads r and y once and writes s and x; its backward pass keeps the
gradients of weight and bias as tiles in registers over all rows of a program, and adds up the
programs in order, so that a call repeats bit by bit.

Shape suffixes: N rows (in any leading shape), D width.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes

EPSILON = 1e-5
"""That of torch's LayerNorm."""


def residual_norm(
    r_ND: Tensor,
    y_ND: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None = None,
    *,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the sum s_ND and the normed sum x_ND, in the dtype of r.

    Args:
        r_ND, y_ND: one shape and floating dtype.
        bias_D: of a layer norm; None: an RMS norm.
        backend: `reference` or, on CUDA, `triton`, which takes no fp64.

    Raises:
        LookupError: no such backend.
    """
    result: tuple[Tensor, Tensor] = FAMILY.load(backend)(r_ND, y_ND, weight_D, bias_D)
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check; a state stands for a layer norm."""
    generator = torch.Generator().manual_seed(sizes.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, width = (sizes.batch, sizes.tokens, sizes.heads), sizes.head_size
    tensors = {
        "r_ND": normal(*rows, width),
        "y_ND": normal(*rows, width),
        "weight_D": 1 + normal(width) / 4,
    }
    if sizes.state:
        tensors["bias_D"] = normal(width)
    return Call(tensors, {})


FAMILY = Family(
    name="residual_norm",
    op=residual_norm,
    backends={
        name: f"archsearch_kernels.residual_norm.{name}:residual_norm"
        for name in ("reference", "triton")
    },
    make_inputs=make_inputs,
    auto={("cuda", dtype): "triton" for dtype in (torch.bfloat16, torch.float16)},
    only_on={"triton": "cuda"},
)
