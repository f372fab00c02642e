"""Take a trained model home: weights, architecture, scores and a script that generates tokens.

A bundle is a folder: `model.safetensors`, `arch.json`, `README.md`, `generate.py`, and `plugins/`
with the one-off mixers that the architecture uses. Loading one needs this package and those files,
no study, database or service. Knows nothing of training.

Shape suffixes: B batch (1 here), T tokens, D width, V vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from archsearch import __version__
from archsearch.arch import ArchSpec
from archsearch.errors import UsageError
from archsearch.messages import PluginFile
from archsearch.model import LanguageModel
from archsearch.registry import add_plugin_file

FORMAT = 1
"""Number of the layout that this version writes and reads."""

_GENERATE = '''"""Load the model in this folder and generate tokens: python generate.py [TOKEN ...]

Without tokens it asks the model to recall: two key-value pairs, then the first key again.
"""

import sys
from pathlib import Path

from archsearch.bundle import generate, load_bundle

model = load_bundle(Path(__file__).parent)
value = model.vocab_size // 2
prompt = [int(token) for token in sys.argv[1:]] or [1, value + 1, 2, value + 2, 1]
print("prompt:   ", *prompt)
print("generated:", *generate(model, prompt, 8))
'''

_README = """# {summary}

Vocabulary {vocab_size}, width {width}. Trained by archsearch {version}.

{about}

## Use

`pip install archsearch`, then `python generate.py` here, or

```python
from archsearch.bundle import generate, load_bundle

model = load_bundle("{folder}")
print(generate(model, [1, 2, 3], 8))
```

`model.mix(tokens, state)` reads a segment and `model.step(token, state)` one token; both continue
from any state, and `model.init_state(batch, context, dtype, device)` is the empty one.
"""


def save_bundle(
    folder: Path,
    arch: ArchSpec,
    vocab_size: int,
    weights: bytes,
    about: Mapping[str, Any],
    plugins: Sequence[PluginFile] = (),
) -> None:
    """Write a bundle into `folder`, which is made if needed. Its mixers need not be known here.

    Args:
        weights: a safetensors file, as a trial returns it.
        about: what else to remember (study, trial, scores); plain JSON values.
        plugins: one-off mixer files of the study; those that the architecture uses are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for plugin in plugins:
        if plugin.name in arch.mixers:
            (folder / "plugins").mkdir(exist_ok=True)
            (folder / "plugins" / f"{plugin.name}.py").write_text(plugin.source, "utf-8")
    described = {
        "format": FORMAT,
        "arch": arch.model_dump(mode="json"),
        "vocab_size": vocab_size,
        "versions": {"archsearch": __version__, "torch": torch.__version__},
        "about": dict(about),
    }
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "arch.json").write_text(json.dumps(described, indent=2) + "\n")
    (folder / "generate.py").write_text(_GENERATE)
    (folder / "README.md").write_text(_readme(folder.name, arch, vocab_size, about))


def _readme(folder: str, arch: ArchSpec, vocab_size: int, about: Mapping[str, Any]) -> str:
    return _README.format(
        summary=arch.summary,
        vocab_size=vocab_size,
        width=arch.width,
        version=__version__,
        about="\n".join(f"* {name}: {value}" for name, value in about.items()),
        folder=folder,
    )


def load_bundle(folder: Path | str) -> LanguageModel:
    """Read a bundle back as a model on the CPU, in the dtype it was stored in.

    Raises:
        UsageError: not a bundle, a format of a later version, or weights of another architecture.
        PluginError: a mixer that is not installed here and not in the bundle.
    """
    folder = Path(folder)
    described, weights = _read(folder)
    for path in sorted((folder / "plugins").glob("*.py")):
        add_plugin_file(path)
    model = LanguageModel(ArchSpec.model_validate(described["arch"]), described["vocab_size"])
    try:
        model.load_state_dict(load(weights))
    except (RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"{folder / 'model.safetensors'} does not hold the weights of the architecture in "
            f"arch.json: {error}"
        ) from error
    return model.eval()


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    for name in ("arch.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} is not an exported model: it has no {name}")
    try:
        described: dict[str, Any] = json.loads((folder / "arch.json").read_text())
        stored = described["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / 'arch.json'} is damaged: {error!r}") from error
    if stored != FORMAT:
        raise UsageError(
            f"{folder} has format {stored}; archsearch {__version__} reads format {FORMAT}"
        )
    return described, (folder / "model.safetensors").read_bytes()


@torch.no_grad()
def generate(model: LanguageModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` most likely tokens after a prompt, one `step` each.

    Raises:
        UsageError: an empty prompt, or a token outside the vocabulary.
    """
    wrong = [token for token in prompt if not 0 <= token < model.vocab_size]
    if wrong or not prompt:
        found = f"token {wrong[0]}" if wrong else "an empty prompt"
        raise UsageError(
            f"found {found}; a prompt is one or more tokens from 0 to {model.vocab_size - 1}"
        )
    weight = model.embedding.weight
    state = model.init_state(1, len(prompt) + count, weight.dtype, weight.device)
    tokens_BT = torch.tensor([list(prompt)], device=weight.device)
    hidden_BTD, state = model.mix(tokens_BT, state)
    logits_BV = model.logits(hidden_BTD[:, -1])
    generated = []
    for _ in range(count):
        token_B = logits_BV.argmax(-1)
        generated.append(int(token_B))
        logits_BV, state = model.step(token_B, state)
    return generated
