"""A model taken home: the same model, in a fresh process, from the folder alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from one_off import one_off, stored_arch
from safetensors.torch import save

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.bundle import generate, load_bundle, save_bundle
from archsearch.errors import UsageError
from archsearch.model import LanguageModel
from archsearch.registry import add_plugin_file, forget_plugin_file, mixer_names

VOCAB = 24
ABOUT = {"study": "quickstart", "trial": 7, "recall": 0.98}


def hybrid() -> ArchSpec:
    return ArchSpec(
        width=16,
        layers=tuple(LayerSpec(mixer=mixer, fields={}) for mixer in mixer_names()),
        channel_mixer=ChannelSpec(kind="swiglu", ratio=2.0),
    )


def random_model(arch: ArchSpec) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(arch, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = random_model(hybrid())
    save_bundle(tmp_path / "home", model.arch, VOCAB, save(model.state_dict()), ABOUT)
    return tmp_path / "home"


def greedy(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """By a whole pass for every token, without any state."""
    tokens = list(prompt)
    for _ in range(count):
        hidden_BTD = model(torch.tensor([tokens]))
        tokens.append(int(model.logits(hidden_BTD[0, -1]).argmax()))
    return tokens[len(prompt) :]


def test_a_bundle_is_the_model_it_was_made_from(folder: Path) -> None:
    loaded, model = load_bundle(folder), random_model(hybrid())
    tokens = torch.randint(0, VOCAB, (2, 9))
    assert loaded.arch == model.arch
    assert torch.equal(loaded(tokens), model(tokens))
    described = json.loads((folder / "arch.json").read_text())
    assert described["about"] == ABOUT
    readme = (folder / "README.md").read_text()
    assert model.arch.summary in readme and "trial: 7" in readme


@pytest.mark.parametrize("prompt", [[3], [1, 13, 2, 14, 1]])
def test_generated_tokens_are_those_of_whole_passes(folder: Path, prompt: list[int]) -> None:
    model = load_bundle(folder)
    assert generate(model, prompt, 12) == greedy(model, prompt, 12)


def test_its_script_runs_in_a_fresh_process_elsewhere(folder: Path, tmp_path: Path) -> None:
    prompt = [1, 13, 2, 14, 1]
    command = [sys.executable, str(folder / "generate.py")]
    asked = [*command, *(str(token) for token in prompt)]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
    wanted = greedy(random_model(hybrid()), prompt, 8)
    assert done.stdout.splitlines() == [
        "prompt:    " + " ".join(map(str, prompt)),
        "generated: " + " ".join(map(str, wanted)),
    ]
    default = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert default.stdout.startswith("prompt:    1 13 2 14 1\n")


@pytest.fixture
def one_off_name(tmp_path: Path) -> Iterator[str]:
    plugin = one_off("one_off_bundled")
    (tmp_path / "one_off_bundled.py").write_text(plugin.source)
    add_plugin_file(tmp_path / "one_off_bundled.py")
    yield plugin.name
    if plugin.name in mixer_names():
        forget_plugin_file(plugin.name)


def test_one_off_mixers_travel_with_the_model(one_off_name: str, tmp_path: Path) -> None:
    model = random_model(stored_arch(one_off_name))
    plugins = (one_off(one_off_name), one_off("one_off_unused"))
    home = tmp_path / "home"
    wanted = greedy(model, [1, 13, 2, 14, 1], 8)
    # A study that is read from the database alone has not loaded its mixers.
    forget_plugin_file(one_off_name)
    (tmp_path / "one_off_bundled.py").unlink()
    save_bundle(home, model.arch, VOCAB, save(model.state_dict()), {}, plugins)
    assert [path.name for path in (home / "plugins").iterdir()] == ["one_off_bundled.py"]
    assert generate(load_bundle(home), [1, 13, 2, 14, 1], 8) == wanted
    done = subprocess.run(
        [sys.executable, "generate.py"], cwd=home, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1] == "generated: " + " ".join(map(str, wanted))


def test_a_folder_that_is_no_bundle_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no arch\.json"):
        load_bundle(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"it has no model\.safetensors"):
        load_bundle(folder)


def test_damage_is_said(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UsageError, match="does not hold the weights"):
        load_bundle(folder)
    (folder / "model.safetensors").write_bytes(whole)
    described = json.loads((folder / "arch.json").read_text())
    wider = {**described, "arch": {**described["arch"], "width": 32}}
    (folder / "arch.json").write_text(json.dumps(wider))
    with pytest.raises(UsageError, match="does not hold the weights"):
        load_bundle(folder)
    (folder / "arch.json").write_text(json.dumps({**described, "format": 2}))
    with pytest.raises(UsageError, match=r"has format 2; .* reads format 1"):
        load_bundle(folder)
    (folder / "arch.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "an empty prompt"), ([1, VOCAB], "found token 24"), ([-1], "token -1")],
)
def test_impossible_prompts_are_refused(folder: Path, prompt: list[int], said: str) -> None:
    with pytest.raises(UsageError, match=f"{said}; a prompt is one or more tokens from 0 to 23"):
        generate(load_bundle(folder), prompt, 3)
