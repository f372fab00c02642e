"""Lists what is installed here: mixers with their fields and ranges, published architectures.

An architecture is counted and costed from its layout; no weight of it is made.
"""

import inspect
import itertools
from typing import Any

import torch

from archsearch.arch import ArchSpec
from archsearch.architectures import PUBLISHED, Published, published_architecture
from archsearch.cost import flops_per_token, parameters, state_range, zoology_state_bytes
from archsearch.errors import PluginError
from archsearch.registry import default_parts, load_mixer, mixer_fields, mixer_names
from archsearch.space import Field, Range
from archsearch.tables import aligned, with_fields
from archsearch.units import format_bytes, format_count

Json = dict[str, Any]

CONTEXTS = (1_024, 4_096, 32_768, 131_072)
"""Tokens at which a published architecture's state and FLOPs are told."""

_DTYPE = torch.bfloat16  # of activations and KV caches, as such models are served


def mixers_values() -> list[Json]:
    """One entry a mixer; one that cannot be used has an `error` and nothing else."""
    return [_mixer(name) for name in mixer_names()]


def _mixer(name: str) -> Json:
    try:
        mixer, fields = load_mixer(name), mixer_fields(name)
    except PluginError as error:
        return {"name": name, "error": str(error)}
    module = inspect.getmodule(mixer)
    doc = inspect.getdoc(module) or inspect.getdoc(mixer) or ""
    return {
        "name": name,
        "summary": doc.split("\n")[0],
        "module": mixer.__module__,
        "kernels": {family: list(backends) for family, backends in mixer.kernels.items()},
        "parts": [part.mixer for part in default_parts(name)],
        "fields": [
            {
                "name": field.name,
                "type": field.type.__name__,
                "default": field.default,
                "candidates": list(field.candidates) if field.domain is not None else None,
                "doc": field.doc,
            }
            for field in fields.values()
        ],
    }


def mixers_text() -> str:
    """The same for people: a paragraph a mixer, a line a field."""
    return "\n\n".join(map(_paragraph, mixers_values()))


def _paragraph(values: Json) -> str:
    name = values["name"]
    if "error" in values:
        return f"{name}: cannot be used: {values['error']}"
    lines = [f"{name}: {values['summary']}"]
    if values["parts"]:
        usual = ", ".join(values["parts"])
        lines.append(f"    {'parts':<12} two mixers or more, default {usual}")
    for field in mixer_fields(name).values():
        note = f"  ({field.doc})" if field.doc else ""
        lines.append(f"    {field.name:<12} {_domain(field)}, default {field.default}{note}")
    return "\n".join(lines)


def _domain(field: Field) -> str:
    domain = field.domain
    if domain is None:
        return f"any {field.type.__name__}, not searched by default"
    if isinstance(domain, Range) and len(domain.values) > 4:
        step = "doubling" if domain.scale == "log2" else f"step {domain.step}"
        return f"{domain.low} to {domain.high}, {step}"
    return " | ".join(map(str, domain.values))


def architectures_values() -> list[Json]:
    """Name, source and published size of every published architecture."""
    return [
        {"name": one.name, "source": one.source, "published_parameters": one.parameters}
        for one in PUBLISHED
    ]


def architectures_text() -> str:
    """The same as a table."""
    rows = [(one.name, one.parameters, one.source) for one in PUBLISHED]
    return aligned(("architecture", "published", "source"), rows)


def architecture_values(name: str) -> Json:
    """Layout, parameters, and state and FLOPs at several contexts, of a published architecture.

    Raises:
        UsageError: no such architecture.
    """
    published = published_architecture(name)
    arch = published.build()
    return {
        "name": published.name,
        "source": published.source,
        "note": published.note,
        "published_parameters": published.parameters,
        "parameters": parameters(arch, published.vocab_size),
        "vocab_size": published.vocab_size,
        "contexts": [_at(arch, published, context) for context in CONTEXTS],
        "architecture": arch.model_dump(mode="json"),
    }


def _at(arch: ArchSpec, published: Published, context: int) -> Json:
    return {
        "context": context,
        "flops_per_token": flops_per_token(arch, published.vocab_size, context),
        "state_bytes": state_range(arch, context, _DTYPE)._asdict(),
        "zoology_state_bytes": zoology_state_bytes(arch, context),
    }


def architecture_text(name: str) -> str:
    """The same for people. Raises UsageError."""
    values = architecture_values(name)
    arch = published_architecture(name).build()
    channel = arch.channel_mixer
    after = (
        "" if channel.kind == "none" else f", {channel.kind} of ratio {channel.ratio:g} after each"
    )
    lines = [
        f"{values['name']}: {values['source']}",
        f"width {arch.width}, {len(arch.layers)} layers{after}, {arch.norm}, "
        f"{'tied' if arch.tied_head else 'separate'} head, vocabulary {values['vocab_size']:,}",
        *_layout(arch),
        f"parameters {values['parameters']:,}; published: {values['published_parameters']}",
    ]
    lines += [values["note"]] if values["note"] else []
    return "\n".join(lines) + "\n\n" + _costs_text(values["contexts"])


def _layout(arch: ArchSpec) -> list[str]:
    """One line for each distinct layer: where it stands, its mixer and its fields."""
    places: dict[str, list[int]] = {}
    for index, layer in enumerate(arch.layers):
        parts = " + ".join(map(with_fields, layer.parts))
        said = f"{with_fields(layer)} of {parts}" if parts else with_fields(layer)
        places.setdefault(said, []).append(index)
    return [f"  {_ranges(at)}: {layer}" for layer, at in places.items()]


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _costs_text(contexts: list[Json]) -> str:
    varies = any(len({*at["state_bytes"].values()}) > 1 for at in contexts)
    names = ("minimum", "expected", "maximum") if varies else ("maximum",)
    titles = [f"state, {name}" for name in names] if varies else ["state"]
    rows = []
    for at in contexts:
        zoology = at["zoology_state_bytes"]
        rows.append(
            (
                f"{at['context']:,}",
                *(format_bytes(at["state_bytes"][name]) for name in names),
                "-" if zoology is None else format_bytes(zoology),
                format_count(at["flops_per_token"]),
            )
        )
    return aligned(("context", *titles, "state, zoology", "FLOPs per token"), rows)
