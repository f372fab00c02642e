"""DeltaNet: a matrix memory that corrects what it stored under a key (arXiv:2406.06484).

Each of H heads has keys and queries of K = `head_dim` numbers and values of V = `expand_v` K. All
three pass a short convolution of `conv` taps (0: none) and SiLU; queries and keys are scaled to
length 1. The memory S is corrected along the key by what it predicts wrongly, and forgets nothing
otherwise (the delta rule of Schlag et al., arXiv:2102.11174):

    beta_t = sigmoid(W_b x_t)
    S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
    y_t = W_out norm(S_t q_t)

The norm scales each head to root mean square 1, times learned weights. `gate` multiplies it by
SiLU(W_g x). This is `gated_delta` with a decay of 1, and its code.

The state is S, and the last inputs of the convolution.

It starts as `gated_delta` does: projections as N(0, 1 / inputs), taps within 0.1 of passing the
current token on. Left out are the published options for other activations and norms of keys, for
fixed beta and for negative eigenvalues.

Shape suffixes: none of its own; see `gated_delta`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from archsearch.space import Choice
from archsearch_plugins.gated_delta import GatedDelta


class DeltaNet(GatedDelta):
    """A matrix memory per head that corrects what it stored under a key."""

    @dataclass(frozen=True, kw_only=True)
    class Config(GatedDelta.Config):
        expand_v: Annotated[int, Choice(1, 2), "size of a value over the size of a key"] = 1
        gate: Annotated[bool, "gate the output by SiLU of a projection"] = False

        decays: ClassVar[bool] = False

    config: Config
