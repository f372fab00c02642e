"""Lists the mixers that are installed here, with their fields and declared ranges."""

import inspect
from typing import Any

from archsearch.errors import PluginError
from archsearch.registry import default_parts, load_mixer, mixer_fields, mixer_names
from archsearch.space import Field, Range

Json = dict[str, Any]


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
