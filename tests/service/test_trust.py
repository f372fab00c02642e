"""What comes from outside is data: study files, workers' answers, exported models."""

import pickle
from pathlib import Path

import pytest
from odd_payloads import FUNCTION, Bomb, payloads
from safetensors.torch import load_file, save
from service_cases import Watcher, check_books, stored
from stub_trials import changed, stub_study
from torch import zeros

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.bundle import load_bundle, save_bundle
from archsearch.coordinator import run_study
from archsearch.errors import FailureClass, SpecError, UsageError
from archsearch.model import LanguageModel
from archsearch.study_file import load_study

ARCH = ArchSpec(
    width=16,
    layers=(LayerSpec(mixer="base_conv", fields={}),),
    channel_mixer=ChannelSpec(kind="none", ratio=1.0),
)


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:pathlib.Path.touch [{}]",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/name:os.system",
    ],
)
def test_a_study_file_makes_no_python_objects(tmp_path: Path, value: str) -> None:
    (tmp_path / "study.yaml").write_text(f"study: {value.format(tmp_path / 'exploded')}\n")
    with pytest.raises(SpecError, match="found the tag"):
        load_study(tmp_path / "study.yaml")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.usefixtures("ray_here")
def test_an_odd_answer_fails_its_trial_and_is_not_executed(tmp_path: Path) -> None:
    count = len(payloads(tmp_path))
    spec = changed(stub_study(tmp_path), "search", trials=count)
    run_study(spec, (), Watcher(), trial_function=FUNCTION)
    failures = [trial.failure for trial in stored(spec) if trial.duplicate_of is None]
    worked = [failure for failure in failures if failure is not None]
    assert len(worked) >= count and set(worked) == {FailureClass.PLUGIN_ERROR}
    assert not (tmp_path / "exploded").exists()
    check_books(spec)


def test_an_exported_model_is_safetensors_and_text(tmp_path: Path) -> None:
    model = LanguageModel(ARCH, 8)
    save_bundle(tmp_path, ARCH, 8, save(model.state_dict()), {})
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json", ".md", ".py"}
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def test_weights_that_are_a_pickle_are_refused_and_not_executed(tmp_path: Path) -> None:
    home, fuse = tmp_path / "home", tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(fuse))
    for weights in (bomb, save({"x": zeros(1)}) + bomb):
        save_bundle(home, ARCH, 8, weights, {})
        with pytest.raises(UsageError, match="does not hold the weights"):
            load_bundle(home)
    assert not fuse.exists()
    pickle.loads(bomb)
    assert fuse.exists()  # it would have
