"""A sound one-off mixer as source text, and how tests break it: by replacing parts of the text."""

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.messages import PluginFile

SOURCE = '''"""Adds a projection of the token before to every token. A, B, C: nothing."""

from dataclasses import dataclass

import torch
from torch import nn

from archsearch.mixer import Mixer, StateTensor


class OneOff(Mixer):
    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        scale: int = 1

        def __post_init__(self):
            if self.scale > 9:
                raise ValueError(f"scale is {self.scale}; at most 9")

        def state_spec(self, context_len, dtype):
            return (StateTensor("before", (self.d_model,), dtype),)

        def flops(self, context_len):
            return 2 * self.d_model**2

    def __init__(self, config):
        super().__init__(config)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def mix(self, x, state):
        shifted = torch.cat((state["before"][:, None], x[:, :-1]), dim=1)
        return self.out(shifted) * self.config.scale, {"before": x[:, -1].clone()}
'''

KEEPS_MORE = {"x[:, -1].clone()}": 'x[:, -1].clone(), "more": x[:, 0].clone()}'}
"""A tensor that state_spec does not list."""

KEEPS_A_VIEW = {"x[:, -1].clone()": "x[:, -1]"}
"""The last token as a view, which keeps the whole segment alive."""


def one_off(name: str, replaced: dict[str, str] | None = None) -> PluginFile:
    """The mixer under a name of its own, with parts of its source replaced."""
    source = SOURCE
    for old, new in (replaced or {}).items():
        assert old in source, old
        source = source.replace(old, new)
    return PluginFile(name=name, source=source)


def stored_arch(name: str, width: int = 16, **fields: int) -> ArchSpec:
    """An architecture of that mixer, as a worker gets it: before the plugin is known."""
    layers = [LayerSpec.model_construct(mixer=name, fields={"scale": 1, **fields})]
    plain = {"width": width, "channel_mixer": {"kind": "none", "ratio": 0.0}}
    return ArchSpec.from_stored({**plain, "layers": [layer.model_dump() for layer in layers]})
