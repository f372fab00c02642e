"""Definition of the residual norm: an addition, and torch's norm.

Shape suffixes: N rows, D width.
"""

from torch import Tensor
from torch.nn import functional as F

from archsearch_kernels.residual_norm import EPSILON


def residual_norm(
    r_ND: Tensor, y_ND: Tensor, weight_D: Tensor, bias_D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `archsearch_kernels.residual_norm.residual_norm`."""
    s_ND = r_ND + y_ND
    return s_ND, norm(s_ND, weight_D, bias_D)


def norm(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
    """A layer norm, or without a bias an RMS norm."""
    if bias_D is None:
        return F.rms_norm(x_ND, weight_D.shape, weight_D, EPSILON)
    return F.layer_norm(x_ND, weight_D.shape, weight_D, bias_D, EPSILON)
