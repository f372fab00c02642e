"""What an architecture costs, known without running it: parameters, state bytes, FLOPs per token.

Exact: parameters are counted on the meta device, state bytes come from the mixers' declarations
(and are compared with what decoding really keeps when a trial is profiled). Also the cheap gates:
which limits of a study an architecture breaks. Knows nothing of training.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from numbers import Real

import torch

from archsearch.arch import ArchSpec
from archsearch.errors import InfeasibleError, PluginError
from archsearch.mixer import Mixer, StateRange
from archsearch.mixer import state_bytes as mixer_state_bytes
from archsearch.model import LanguageModel
from archsearch.registry import load_mixer
from archsearch.spec import (
    KNOWN_BEFORE_TRAINING,
    MEASURED_AFTER_TRAINING,
    PLACED,
    Metric,
    StudySpec,
)
from archsearch.units import format_bytes

LARGEST = 2**38
"""Bytes that parameters or the state of one sequence may take. No device holds more, and a model
that cannot be trained must not begin to fill a machine's memory."""

_UNITS = {"state_bytes": "bytes", "parameters": "parameters", "flops_per_token": "FLOPs per token"}


def compute_dtype(precision: str) -> torch.dtype:
    """Dtype of activations and KV caches under a recipe's precision (`fp32`, `tf32`, `bf16`)."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def parameters(arch: ArchSpec, vocab_size: int) -> int:
    """Number of parameters; the tied embedding counts once. Raises PluginError, InfeasibleError."""
    found = _counted(arch.model_copy(update={"layers": ()}), vocab_size)
    for layer in arch.layers:
        alone = arch.model_copy(update={"layers": (layer,)})
        found += _of_layer(alone.canonical_json, tuple(map(load_mixer, alone.mixers)))
    return found


@lru_cache(4096)
def _of_layer(stored: str, _mixers: tuple[type[Mixer], ...]) -> int:
    """Parameters of the layer of an architecture of one layer, as its stored JSON.

    Building a layer takes milliseconds, and a search asks of the same layers again and again. The
    classes are part of the key, because a mixer's file may be loaded anew.
    """
    arch = ArchSpec.from_stored(json.loads(stored))
    return _counted(arch, 1) - _counted(arch.model_copy(update={"layers": ()}), 1)


def _counted(arch: ArchSpec, vocab_size: int) -> int:
    with torch.device("meta"):
        model = LanguageModel(arch, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def state_bytes(arch: ArchSpec, context: int, dtype: torch.dtype) -> int:
    """Bytes that decoding one sequence of `context` tokens keeps, KV entries being in `dtype`."""
    return sum(mixer_state_bytes(config, context, dtype) for config in arch.configs())


def state_range(arch: ArchSpec, context: int, dtype: torch.dtype) -> StateRange:
    """Least, expected and most bytes of `state_bytes` where the data decide what is kept."""
    ranges = [config.state_range(context, dtype) for config in arch.configs()]
    return StateRange(*(sum(column) for column in zip(*ranges, strict=True)))


def zoology_state_bytes(arch: ArchSpec, context: int) -> int | None:
    """State as the Zoology repository's published figures draw it: 4 bytes a number it counts.

    It leaves out some of what decoding keeps; None if it does not know one of the mixers.
    Source: github.com/HazyResearch/zoology, `state_size` of each mixer.
    """
    counted = [config.zoology_state_elements(context) for config in arch.configs()]
    known = [number for number in counted if number is not None]
    return 4 * sum(known) if len(known) == len(counted) else None


def flops_per_token(arch: ArchSpec, vocab_size: int, context: int) -> int:
    """Forward FLOPs per token, averaged over a context; one multiply-add counts 2.

    Mixers declare their own; the head is one matrix. The embedding look-up, norms and residual sums
    are left out. Raises PluginError for a mixer without a finite number.
    """
    mixers = sum(_declared_flops(config, context) for config in arch.configs())
    channel = arch.channel_mixer.config(arch.width)
    channels = len(arch.layers) * _declared_flops(channel, context) if channel is not None else 0
    return mixers + channels + 2 * arch.width * vocab_size


def _declared_flops(config: Mixer.Config, context: int) -> int:
    """What a mixer declares; a sampler and a front cannot use what is not a number."""
    value = config.flops(context)
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise PluginError(
            f"{type(config).__qualname__}.flops({context}) returned {value!r}; "
            "expected a finite number, 0 or more"
        )
    return round(value)


def known_metric(arch: ArchSpec, spec: StudySpec, metric: Metric, context: int) -> int:
    """One metric that the architecture alone decides. Raises PluginError, InfeasibleError."""
    if metric == "parameters":
        return parameters(arch, spec.vocab_size)
    if metric == "flops_per_token":
        return flops_per_token(arch, spec.vocab_size, context)
    assert metric == "state_bytes", metric
    return state_bytes(arch, context, compute_dtype(spec.train.precision))


def known_metrics(arch: ArchSpec, spec: StudySpec) -> dict[str, float]:
    """Every metric that the architecture alone decides, at the study's place for it.

    Raises:
        PluginError, InfeasibleError: from the mixers of the architecture.
    """
    return {
        metric: float(known_metric(arch, spec, metric, spec.place(metric)[1]))
        for metric in KNOWN_BEFORE_TRAINING
    }


def violations(arch: ArchSpec, spec: StudySpec) -> tuple[str, ...]:
    """Sentences that say why the study excludes this architecture before training; empty if not.

    Limits on measured metrics are not looked at here.
    """
    try:
        arch.configs()
    except InfeasibleError as error:
        return (str(error),)
    found = []
    for limit in spec.limits:
        if limit.metric in MEASURED_AFTER_TRAINING:
            continue
        _, context = spec.place_of(limit)
        value = known_metric(arch, spec, limit.metric, context)
        if value > limit.maximum:
            where = f" at context {context}" if PLACED[limit.metric] else ""
            found.append(
                f"{limit.metric}{where} is {value:,} {_UNITS[limit.metric]}; "
                f"the limit is {limit.maximum:,.0f}"
            )
    return tuple(found)


def too_large(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Sentences that say why no device can hold an architecture; empty if one may."""
    sizes = {
        "parameters": 4 * round(metrics.get("parameters", 0)),
        "the state of one sequence": round(metrics.get("state_bytes", 0)),
    }
    most = f"no device holds more than {format_bytes(LARGEST)}"
    return tuple(
        f"{what} would take {format_bytes(size)}; {most}"
        for what, size in sizes.items()
        if size > LARGEST
    )
