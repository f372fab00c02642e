"""ArchSpec: one architecture, canonical and hashed.

Two architectures are the same if their canonical JSON is: every field of every mixer is written
out with its value, keys are sorted, and what makes no difference at this width is as the mixer's
`Config.canonical` writes it. The hash is the key of every result, so equal architectures are never
trained twice. Knows nothing of tasks or training.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from archsearch.errors import PluginError, nearest
from archsearch.mixer import Mixer
from archsearch.model_spec import Norm
from archsearch.registry import (
    canonical_config,
    channel_mixer_names,
    default_parts,
    load_mixer,
    make_config,
    mixer_fields,
    mixer_names,
    part_of,
    written_out,
)
from archsearch.space import Part, Value

NO_MIXER = "none"
"""In place of a mixer: nothing."""


class LayerSpec(BaseModel):
    """One mixer, the value of each of its fields, and its parts if it is made of mixers.

    `parts` has no parts itself. It is left out of the JSON if empty. Within an architecture a layer
    is canonical.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mixer: str
    fields: dict[str, Value]
    parts: tuple["LayerSpec", ...] = Field(default=(), exclude_if=lambda parts: not parts)

    @model_validator(mode="after")
    def _write_out(self) -> Self:
        object.__setattr__(self, "fields", written_out(self.mixer, self.fields))
        parts = self.parts or tuple(map(_of_part, default_parts(self.mixer)))
        object.__setattr__(self, "parts", parts)
        return self

    def canonical(self, width: int) -> "LayerSpec":
        """The one way to write this layer at a width; as it is if it cannot be built there."""
        config = canonical_config(self.mixer, width, self.fields, self._plain_parts)
        if config is None:
            return self
        fields, parts = part_of(self.mixer, config).fields, tuple(map(_of_part, config.parts))
        if fields == self.fields and parts == self.parts:
            return self
        return LayerSpec(mixer=self.mixer, fields=dict(fields), parts=parts)

    @staticmethod
    def from_stored(plain: Mapping[str, Any]) -> "LayerSpec":
        """A layer exactly as its JSON says, unchecked."""
        parts = tuple(LayerSpec.from_stored(part) for part in plain.get("parts", ()))
        return LayerSpec.model_construct(**{**plain, "parts": parts})

    @property
    def _plain_parts(self) -> tuple[Part, ...]:
        return tuple(Part(part.mixer, part.fields) for part in self.parts)

    @property
    def nested(self) -> tuple["LayerSpec", ...]:
        """The layer itself, then its parts."""
        return (self, *self.parts)

    @property
    def label(self) -> str:
        """The mixer with the names of its parts, such as `parallel(gated_delta+attention)`."""
        names = "+".join(part.mixer for part in self.parts)
        return f"{self.mixer}({names})" if names else self.mixer

    def config(self, width: int) -> Mixer.Config:
        """Build the mixer's config. Raises PluginError or InfeasibleError."""
        return make_config(self.mixer, width, self.fields, self._plain_parts)


def _of_part(part: Part) -> LayerSpec:
    return LayerSpec(mixer=part.mixer, fields=dict(part.fields))


class ChannelSpec(BaseModel):
    """The channel mixer after each mixer: `none`, or a mixer that looks at one token at a time.

    `ratio` is its inner width over the model width; its other fields have their defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "none"
    ratio: float = 0.0

    def canonical(self, width: int) -> "ChannelSpec":
        """As that of a layer."""
        if self.kind == NO_MIXER:
            return ChannelSpec()
        try:
            layer = LayerSpec(mixer=self.kind, fields={"ratio": self.ratio})
        except PluginError:
            return self
        ratio = layer.canonical(width).fields["ratio"]
        return self if ratio == self.ratio else ChannelSpec(kind=self.kind, ratio=float(ratio))

    def config(self, width: int) -> Mixer.Config | None:
        """Build the channel mixer's config; None for `none`.

        Raises:
            PluginError: no such channel mixer; the text lists those that are installed.
            InfeasibleError: its own rules exclude the ratio.
        """
        if self.kind == NO_MIXER:
            return None
        if self.kind not in mixer_names() or not load_mixer(self.kind).per_token:
            names = (NO_MIXER, *channel_mixer_names())
            raise PluginError(
                f"no channel mixer '{self.kind}'{nearest(self.kind, names)}; "
                f"there are: {', '.join(names)}"
            )
        return make_config(self.kind, width, {"ratio": self.ratio})


class ArchSpec(BaseModel):
    """A complete architecture: width, mixers in order of depth, channel mixer, norm, head.

    `norm` stands before every mixer and at the end; a `tied_head` is the embedding once more. What
    most architectures have is left out of the JSON, so that it came later changes no hash.
    The vocabulary is not part of it: the task gives it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    layers: tuple[LayerSpec, ...]
    channel_mixer: ChannelSpec = ChannelSpec()
    norm: Norm = Field(default="layernorm", exclude_if=lambda norm: norm == "layernorm")
    tied_head: bool = Field(default=True, exclude_if=lambda tied: tied)

    @model_validator(mode="after")
    def _make_canonical(self) -> Self:
        known: dict[int, LayerSpec] = {}
        for layer in self.layers:  # what is repeated is mostly one object
            if id(layer) not in known:
                known[id(layer)] = layer.canonical(self.width)
        object.__setattr__(self, "layers", tuple(known[id(layer)] for layer in self.layers))
        object.__setattr__(self, "channel_mixer", self.channel_mixer.canonical(self.width))
        return self

    @property
    def canonical_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def arch_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()[:16]

    @property
    def summary(self) -> str:
        """One line for people, such as `base_conv > linear_attention(feature_dim=16)`."""
        return " > ".join(_layer_summary(layer) for layer in self.layers)

    @staticmethod
    def from_stored(plain: Mapping[str, Any]) -> "ArchSpec":
        """An architecture exactly as its JSON says, unchecked.

        Its mixers may be gone, not yet loaded, or have grown fields since; what was trained, and
        its hash, must not change for that.
        """
        return ArchSpec.model_construct(
            width=plain["width"],
            layers=tuple(LayerSpec.from_stored(layer) for layer in plain["layers"]),
            channel_mixer=ChannelSpec.model_construct(**plain["channel_mixer"]),
            norm=plain.get("norm", "layernorm"),
            tied_head=plain.get("tied_head", True),
        )

    @property
    def mixers(self) -> tuple[str, ...]:
        """Names of all mixers in it, sorted: of layers, of their parts, and the channel mixer."""
        names = {one.mixer for layer in self.layers for one in layer.nested}
        return tuple(sorted((names | {self.channel_mixer.kind}) - {NO_MIXER}))

    @property
    def head_matrix(self) -> str:
        """Name of the parameter that maps hidden vectors to scores over the vocabulary."""
        return "embedding.weight" if self.tied_head else "head.weight"

    def configs(self) -> tuple[Mixer.Config, ...]:
        """Configs of the layers, in order of depth. Raises PluginError or InfeasibleError."""
        return tuple(layer.config(self.width) for layer in self.layers)


def _layer_summary(layer: LayerSpec) -> str:
    try:
        declared = mixer_fields(layer.mixer)
    except PluginError:
        # A stored architecture may outlive its mixer; then every field is shown.
        shown = [f"{name}={value}" for name, value in layer.fields.items()]
    else:
        shown = [
            f"{name}={value}"
            for name, value in layer.fields.items()
            if name not in declared or declared[name].domain is not None
        ]
    shown[:0] = ["+".join(map(_layer_summary, layer.parts))] if layer.parts else []
    return f"{layer.mixer}({', '.join(shown)})" if shown else layer.mixer
