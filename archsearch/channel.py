"""Channel mixers: what follows a sequence mixer and looks at one position at a time.

`swiglu` is the gated MLP of Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), without
biases: W_down(silu(W_gate x) * W_up x). It keeps no state. Knows nothing of the model around it.

Shape suffixes: D model width, F inner width; ... any leading dimensions.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from archsearch.arch import ChannelSpec
from archsearch.errors import PluginError, nearest

KINDS = ("none", "swiglu")
_INIT_STD = 0.02


def inner_width(channel: ChannelSpec, width: int) -> int:
    """Inner width of the gated MLP in features; 0 if there is none."""
    return round(channel.ratio * width) if channel.kind == "swiglu" else 0


class SwiGlu(nn.Module):
    """Gated MLP from `width` features to `width` features; weights start as N(0, 0.02)."""

    residual_projections = ("down.weight",)

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        for linear in (self.gate_up, self.down):
            nn.init.normal_(linear.weight, std=_INIT_STD)

    def forward(self, x_D: Tensor) -> Tensor:
        gate_F, up_F = self.gate_up(x_D).chunk(2, dim=-1)
        y_D: Tensor = self.down(F.silu(gate_F) * up_F)
        return y_D


def make_channel_mixer(channel: ChannelSpec, width: int) -> SwiGlu | None:
    """Build the channel mixer of one layer, or None for `none`.

    Raises:
        PluginError: an unknown kind, or a ratio that leaves no inner feature.
    """
    if channel.kind not in KINDS:
        raise PluginError(
            f"no channel mixer '{channel.kind}'{nearest(channel.kind, KINDS)}; "
            f"there are: {', '.join(KINDS)}"
        )
    if channel.kind == "none":
        return None
    inner = inner_width(channel, width)
    if inner < 1:
        raise PluginError(
            f"channel mixer 'swiglu' with ratio {channel.ratio:g} at width {width} has no inner "
            "feature; the ratio times the width must be at least 1"
        )
    return SwiGlu(width, inner)
