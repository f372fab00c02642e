"""Writes docs/mixers.md: every built-in mixer, from what its module says and declares.

`python docs/mixers_page.py` writes the page and one figure a mixer; `make docs` calls it. The page
is a function of the plugins alone, and a test holds the file to it.

Shape suffixes: T tokens that an output stands at, S tokens that an input stands at.
"""

import inspect
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from archsearch_kernels import families, resolve
from archsearch_kernels.family import Family
from matplotlib.axes import Axes
from torch import Tensor

from archsearch.mixer import Mixer, state_bytes
from archsearch.registry import (
    BUILTIN_PACKAGE,
    default_parts,
    load_mixer,
    make_config,
    mixer_fields,
    mixer_names,
)
from archsearch.space import Field, Range

PAGE = Path(__file__).parent / "mixers.md"
IMAGES = Path(__file__).parent / "images" / "mixers"
WIDTH, CONTEXT, LONG = 128, 1_024, 131_072
"""Model width and contexts, in tokens, of the numbers on the page."""

_SHOWN = 48
"""Tokens of a figure."""

_HEAD = """\
# The built-in mixers

Written by `make docs` from the mixers themselves; [writing_mixers.md](writing_mixers.md) is about
your own. Bytes, FLOPs and parameters are those of the defaults at width {width} with caches in
bf16; recurrent states are fp32. A figure shows, left, how much each input token moves each output
token at the start of training (darker: more; a row is an output), and right, the state bytes over
the context.
"""


def page() -> str:
    """The whole page as Markdown."""
    names = [name for name in mixer_names() if _is_builtin(name)]
    contents = "\n".join(f"* [`{name}`](#{name}): {_summary(name)}" for name in names)
    parts = [_HEAD.format(width=WIDTH), contents, *map(_section, names), _kernels()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _is_builtin(name: str) -> bool:
    return load_mixer(name).__module__.startswith(BUILTIN_PACKAGE)


def _doc(name: str) -> list[str]:
    """Paragraphs of what a mixer's module says, without the legend of shapes."""
    return _paragraphs(inspect.getdoc(inspect.getmodule(load_mixer(name))) or "")


def _paragraphs(text: str) -> list[str]:
    return [part for part in text.split("\n\n") if not part.startswith("Shape suffixes")]


def _summary(name: str) -> str:
    return " ".join(_doc(name)[0].split())


def _section(name: str) -> str:
    config = make_config(name, WIDTH, {})
    parts = [
        f"## `{name}`",
        *_doc(name),
        f"![{name}: influence of tokens, and state bytes](images/mixers/{name}.png)",
        _fields(name),
        _state(config),
        _costs(name, config),
    ]
    return "\n\n".join(part for part in parts if part)


_PARTS = (
    "two mixers or more, each by name, as `{mixer: {field: value}}` or as `{one_of: [...]}`; "
    "none has parts itself"
)


def _fields(name: str) -> str:
    rows = [
        f"| `{field.name}` | {_domain(field)} | {field.default} | {field.doc} |"
        for field in mixer_fields(name).values()
    ]
    if usual := default_parts(name):
        default = ", ".join(f"`{part.mixer}`" for part in usual)
        rows.insert(0, f"| `parts` | only if a study lists mixers | {default} | {_PARTS} |")
    return (
        "\n".join(["| field | searched | default | |", "|---|---|---|---|", *rows]) if rows else ""
    )


def _domain(field: Field) -> str:
    domain = field.domain
    if domain is None:
        return "only if a study lists values"
    if isinstance(domain, Range) and len(domain.values) > 4:
        step = "doubling" if domain.scale == "log2" else f"step {domain.step}"
        return f"{domain.low} to {domain.high}, {step}"
    return ", ".join(map(str, domain.values))


def _state(config: Mixer.Config) -> str:
    spec = config.state_spec(CONTEXT, torch.bfloat16)
    if not spec:
        return "State: none."
    rows = [
        f"| `{part.name}` | {' x '.join(map(str, part.shape)) or '1'} | "
        f"{str(part.dtype).removeprefix('torch.')} | {part.state_bytes:,} |"
        for part in spec
    ]
    title = f"| state at {CONTEXT:,} tokens | shape | dtype | bytes |"
    return "\n".join([title, "|---|---|---|---|", *rows])


def _costs(name: str, config: Mixer.Config) -> str:
    short, long = (config.state_range(context, torch.bfloat16) for context in (CONTEXT, LONG))
    with torch.device("meta"):
        module = load_mixer(name)(config)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    text = (
        f"State {short.maximum:,} bytes at {CONTEXT:,} tokens, {long.maximum:,} at {LONG:,}"
        + (f" (from {long.minimum:,}, by the data)" if long.minimum < long.maximum else "")
        + f"; {parameters:,} parameters; {config.flops(CONTEXT):,} FLOPs per token."
    )
    called = ", ".join(f"`{family}`" for family in module.kernels)
    return text + (f" Kernels: {called}." if called else "")


def _kernels() -> str:
    rows = []
    for one in families():
        others = ", ".join(f"`{name}`" for name in one.backends if name != "reference") or "none"
        auto = [resolve(one.name, kind, dtype) for kind, dtype in _DEVICES]
        rows.append(f"| `{one.name}` | {others} | `{auto[0]}` | `{auto[1]}` |")
    defined = [f"### Kernels: `{one.name}`\n\n{_family_doc(one)}" for one in families()]
    return "\n\n".join(["\n".join([_KERNELS, *rows]), *defined])


def _family_doc(family: Family) -> str:
    module = inspect.getmodule(family.op)
    return "\n\n".join(_paragraphs(inspect.getdoc(module) or ""))


_DEVICES = (("cpu", torch.float32), ("cuda", torch.bfloat16))

_KERNELS = """\
## Kernels

A mixer calls kernel families of `archsearch_kernels`. Each family has a `reference`, which is its
definition (torch only, fp32 sums, any device), and backends held to it. An explicit backend never
falls back to another, and `auto` is a fixed table of device and dtype, resolved once per trial.
`archsearch check` compares every backend with its reference on the devices at hand, forward and
every gradient, against fp64: a backend passes within twice the reference's own error plus a
rounding.

| family | backends beside the reference | `auto` on CPU | `auto` on CUDA |
|---|---|---|---|"""


def influence(name: str) -> Tensor:
    """How much each input token moves each output token: root mean square of dy_t / dx_s, (T, S).

    Measured at the mixer's own start, with random inputs, along random directions of the output.
    """
    torch.manual_seed(0)
    module = load_mixer(name)(make_config(name, WIDTH, {}))
    x_1TD = torch.randn(1, _SHOWN, WIDTH, requires_grad=True)
    y_TD = module(x_1TD)[0]
    rows = []
    for t in range(_SHOWN):
        (d_1TD,) = torch.autograd.grad(
            (y_TD[t] * torch.randn(WIDTH)).sum(), x_1TD, retain_graph=True
        )
        rows.append(d_1TD[0].square().mean(-1).sqrt())
    return torch.stack(rows)


def _draw(name: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
    strength_TS = influence(name)
    low = strength_TS.max() * 1e-4
    left.imshow(strength_TS.clamp_min(low).log10(), cmap="Greys", interpolation="nearest")
    left.set(xlabel="input token", ylabel="output token")
    _draw_state(right, name)
    figure.savefig(IMAGES / f"{name}.png", dpi=80, metadata={"Software": None})
    plt.close(figure)


def _draw_state(axes: Axes, name: str) -> None:
    config = make_config(name, WIDTH, {})
    if not config.state_spec(CONTEXT, torch.bfloat16):
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no state", ha="center", va="center", transform=axes.transAxes)
        return
    contexts = [2**power for power in range(5, 18)]
    kept = [state_bytes(config, one, torch.bfloat16) for one in contexts]
    axes.plot(contexts, kept, color="black")
    axes.set(xlabel="context in tokens", ylabel="state bytes", xscale="log", yscale="log")
    axes.set_ylim(1e2, 1e8)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in mixer_names():
        if _is_builtin(name):
            _draw(name)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
