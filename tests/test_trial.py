"""A whole trial as its coordinator sees it: events, the score, and one failure of each class."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_off import KEEPS_MORE, one_off, stored_arch
from safetensors.torch import load

from archsearch import population, trial
from archsearch.arch import ArchSpec, LayerSpec
from archsearch.cost import state_bytes
from archsearch.errors import FailureClass, KernelRefusedError
from archsearch.execution import Launcher
from archsearch.messages import (
    Checked,
    Evaluated,
    Evaluation,
    Event,
    Failed,
    MemberResult,
    PluginFile,
    Profiled,
    ProfileSpec,
    Rung,
    Started,
    TrialRequest,
    read_event,
    read_request,
)
from archsearch.model import LanguageModel
from archsearch.mqar import generate
from archsearch.profile import device_model
from archsearch.registry import forget_plugin_file, mixer_names
from archsearch.spec import Execution, MqarSpec, Segment, TrainSpec
from archsearch.trial import chosen_rate, run_trial

TASK = MqarSpec(
    recipe="custom",
    vocab_size=24,
    train=(Segment(length=12, pairs=2, examples=64), Segment(length=16, pairs=3, examples=64)),
    test=(
        Segment(length=12, pairs=2, examples=40),
        Segment(length=16, pairs=2, examples=40),
        Segment(length=16, pairs=4, examples=40),
    ),
    random_filler=False,
)
TRAIN = TrainSpec(
    learning_rates=(1e-2, 1e-3),
    seeds=2,
    epochs=2,
    batch_size=16,
    test_batch_size=16,
    rungs=2,
)
PROFILE = ProfileSpec(prefill=((1, 16),), decode=((1, 16),), exclusive=False)
ARCH = ArchSpec(
    width=16,
    layers=(LayerSpec(mixer="base_conv", fields={}), LayerSpec(mixer="attention", fields={})),
)


@pytest.fixture(autouse=True)
def forget_plugins() -> Iterator[None]:
    before = mixer_names()
    yield
    for name in set(mixer_names()) - set(before):
        forget_plugin_file(name)


def request(arch: ArchSpec = ARCH, **fields: Any) -> TrialRequest:
    given = {"study": "s", "number": 0, "token": "t", "task": TASK, "train": TRAIN}
    given |= {"profile": PROFILE, "seed": 3, "device": "cpu", **fields}
    return TrialRequest.model_validate({**given, "arch": arch})


def events_of(asked: TrialRequest) -> list[Event]:
    """Run from the request's JSON and read back the events' JSON, as between processes."""
    told = read_request(asked.model_dump_json())
    return [read_event(event.model_dump_json()) for event in run_trial(told)]


def failure_of(asked: TrialRequest) -> Failed:
    *_, last = events_of(asked)
    assert isinstance(last, Failed)
    return last


def evaluation_of(events: list[Event]) -> Evaluation:
    (found,) = (event for event in events if isinstance(event, Evaluated))
    return found.evaluation


def untimed(evaluation: Evaluation) -> Evaluation:
    rungs = tuple(rung.model_copy(update={"seconds": 0.0}) for rung in evaluation.rungs)
    return evaluation.model_copy(update={"rungs": rungs, "train_seconds": 0.0})


def test_a_trial_starts_reports_rungs_scores_and_profiles() -> None:
    asked = request()
    events = events_of(asked)
    kinds = [type(event) for event in events]
    assert kinds == [Started, Checked, Checked, Rung, Rung, Evaluated, Profiled]
    evaluation = evaluation_of(events)
    assert evaluation.rungs == tuple(event for event in events if isinstance(event, Rung))
    assert (evaluation.arch_hash, evaluation.recipe_hash) == (ARCH.arch_hash, asked.recipe_hash)
    assert evaluation.kernel_backends == {
        "attention": "sdpa",
        "embed_norm": "reference",
        "head_loss": "blocked",
        "residual_norm": "reference",
        "short_conv": "reference",
    }
    assert [(m.learning_rate, m.seed) for m in evaluation.members] == [
        (1e-2, 0),
        (1e-2, 1),
        (1e-3, 0),
        (1e-3, 1),
    ]
    profiled = events[-1]
    assert isinstance(profiled, Profiled)
    assert profiled.profile.state_bytes == {16: state_bytes(ARCH, 16, torch.float32)}


def test_scores_are_means_over_the_seeds_of_the_chosen_rate() -> None:
    evaluation = evaluation_of(events_of(request()))
    chosen = [m for m in evaluation.members if m.learning_rate == evaluation.learning_rate]
    recalls = [member.report_recall for member in chosen]
    assert len(chosen) == 2
    assert evaluation.recall == pytest.approx(sum(recalls) / 2)
    assert evaluation.recall_spread == pytest.approx(max(recalls) - min(recalls))

    def mean(*names: str) -> float:
        values = [member.report_by_segment[name] for member in chosen for name in names]
        return sum(values) / len(values)

    by_pairs = {2: mean("L12K2", "L16K2"), 4: mean("L16K4")}
    by_length = {12: mean("L12K2"), 16: mean("L16K2", "L16K4")}
    assert evaluation.recall_by_pairs == pytest.approx(by_pairs)
    assert evaluation.recall_by_length == pytest.approx(by_length)


def test_weights_are_those_of_the_best_member_and_give_its_recall() -> None:
    events = events_of(request())
    evaluation = evaluation_of(events)
    (weights,) = (event.weights for event in events if isinstance(event, Evaluated))
    model = LanguageModel(ARCH, TASK.vocab_size)
    model.load_state_dict(load(weights))
    found: dict[str, float] = {}
    for examples in generate(TASK, "report", "cpu"):
        logits = model.logits(model(examples.tokens.long(), examples.at.long()))
        found[examples.name] = (logits.argmax(-1) == examples.labels).double().mean().item()
    chosen = [m for m in evaluation.members if m.learning_rate == evaluation.learning_rate]
    best = max(chosen, key=lambda member: member.selection_recall)
    assert best.report_by_segment == pytest.approx(found)


def test_the_same_request_gives_the_same_score_and_weights() -> None:
    first, second = events_of(request()), events_of(request())
    assert untimed(evaluation_of(first)) == untimed(evaluation_of(second))
    weights = [event.weights for event in (*first, *second) if isinstance(event, Evaluated)]
    assert weights[0] == weights[1]
    other = evaluation_of(events_of(request(seed=4)))
    assert other.members != evaluation_of(first).members
    assert other.recipe_hash != evaluation_of(first).recipe_hash


def test_only_the_profile_is_made_where_training_is_not_wanted() -> None:
    kinds = [type(event) for event in events_of(request(train_wanted=False))]
    assert kinds == [Started, Checked, Checked, Profiled]


def member(rate: float, seed: int, selection: float, report: float) -> MemberResult:
    return MemberResult(
        learning_rate=rate,
        seed=seed,
        diverged=selection == 0.0,
        train_loss=None if selection == 0.0 else 1.0,
        selection_recall=selection,
        report_recall=report,
        report_by_segment={},
    )


def test_learning_rate_is_chosen_on_the_selection_split_alone() -> None:
    small = (member(1e-3, 0, 0.9, 0.1), member(1e-3, 1, 0.9, 0.1))
    large = (member(1e-2, 0, 0.8, 1.0), member(1e-2, 1, 0.95, 1.0))
    assert chosen_rate(small + large) == 1e-3


def test_diverged_members_count_against_their_rate() -> None:
    steady = (member(1e-3, 0, 0.5, 0.5), member(1e-3, 1, 0.5, 0.5))
    lucky = (member(1e-2, 0, 0.9, 0.9), member(1e-2, 1, 0.0, 0.0))
    assert chosen_rate(steady + lucky) == 1e-3
    blind = (member(1e-1, 0, 0.0, 0.0), member(1.0, 0, 0.0, 0.0))
    alive = blind[1].model_copy(update={"diverged": False})
    assert chosen_rate((blind[0], alive)) == 1.0
    assert chosen_rate((blind[0], blind[1])) == 1e-1


def test_threads_and_precision_are_put_back() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    seen = [torch.get_num_threads() for _ in run_trial(request(threads=threads + 1))]
    assert set(seen) == {threads + 1}
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == precision


def test_a_shipped_plugin_is_trained() -> None:
    plugin = one_off("one_off_sound")
    arch = stored_arch("one_off_sound")
    events = events_of(request(arch, plugins=(plugin,)))
    assert isinstance(events[-1], Profiled)
    # The same content again is the same plugin; an edited one is another evaluation.
    again = events_of(request(arch, plugins=(plugin,)))
    assert untimed(evaluation_of(again)) == untimed(evaluation_of(events))
    edited = PluginFile(name=plugin.name, source=plugin.source + "\n")
    assert request(arch, plugins=(edited,)).recipe_hash != evaluation_of(events).recipe_hash
    assert request(ARCH, plugins=(edited,)).recipe_hash == request(ARCH).recipe_hash


MIX = "        shifted ="
RAISES = {
    "raises": ("1 / 0\n", FailureClass.PLUGIN_ERROR, "in OneOff, line 31: ZeroDivisionError"),
    "python_memory": ("raise MemoryError('x')\n", FailureClass.OUT_OF_MEMORY, "MemoryError"),
    "torch_memory": (
        "torch.empty(2**58)\n",
        FailureClass.OUT_OF_MEMORY,
        "DefaultCPUAllocator",
    ),
    "device_memory": (
        "raise torch.OutOfMemoryError('CUDA out of memory')\n",
        FailureClass.OUT_OF_MEMORY,
        "CUDA out of memory",
    ),
    "leaves": ("raise SystemExit(3)\n", FailureClass.PLUGIN_ERROR, "SystemExit: 3"),
    "missing_file": ("open('/no/such/file')\n", FailureClass.PLUGIN_ERROR, "/no/such/file"),
    "own_function": (
        "(lambda: open('/no/such/file'))()\n",
        FailureClass.PLUGIN_ERROR,
        "/no/such/file",
    ),
    "host": ("x.sum().item()\n", FailureClass.PLUGIN_ERROR, "in OneOff"),
    "wrong_shape": ("x = x[..., :3]\n", FailureClass.PLUGIN_ERROR, "in OneOff"),
}


@pytest.mark.parametrize("case", RAISES)
def test_what_a_mixer_raises_is_a_failure_of_its_class(case: str) -> None:
    line, failure, said = RAISES[case]
    plugin = one_off(f"one_off_{case}", {MIX: f"        {line}{MIX}"})
    failed = failure_of(request(stored_arch(plugin.name), plugins=(plugin,)))
    assert failed.failure is failure
    assert said in failed.message
    assert "Traceback" in failed.traceback


def test_a_worker_told_to_end_says_nothing_about_the_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(*_: object) -> None:
        raise SystemExit(1)  # as Ray's handler of SIGTERM does, wherever the trial is

    monkeypatch.setattr(trial, "resolve_backends", told)
    with pytest.raises(SystemExit):
        events_of(request())


def test_a_plugin_that_does_not_import_is_a_plugin_error() -> None:
    plugin = PluginFile(name="one_off_broken", source="import nothing_of_this_name\n")
    failed = failure_of(request(stored_arch(plugin.name), plugins=(plugin,)))
    assert failed.failure is FailureClass.PLUGIN_ERROR
    assert "mixer 'one_off_broken' fails to import" in failed.message


def test_undeclared_state_is_a_plugin_error_after_training() -> None:
    plugin = one_off("one_off_keeps_more", KEEPS_MORE)
    events = events_of(request(stored_arch(plugin.name), plugins=(plugin,)))
    failed = events[-1]
    assert isinstance(failed, Failed) and failed.failure is FailureClass.PLUGIN_ERROR
    assert "keeps 128" in failed.message


def test_an_unknown_mixer_is_a_plugin_error() -> None:
    failed = failure_of(request(stored_arch("no_such_mixer")))
    assert failed.failure is FailureClass.PLUGIN_ERROR
    assert "no mixer 'no_such_mixer'" in failed.message


def test_what_a_mixer_excludes_is_infeasible() -> None:
    plugin = one_off("one_off_excludes")
    failed = failure_of(request(stored_arch(plugin.name, scale=10), plugins=(plugin,)))
    assert failed.failure is FailureClass.INFEASIBLE
    assert "scale is 10; at most 9" in failed.message


def test_a_trial_without_a_finite_member_has_diverged() -> None:
    wild = TRAIN.model_copy(update={"learning_rates": (1e7, 1e8)})
    failed = failure_of(request(train=wild))
    assert failed.failure is FailureClass.DIVERGED
    assert "all 4 members" in failed.message


def test_a_diverged_rate_is_counted_and_not_chosen() -> None:
    wild = TRAIN.model_copy(update={"learning_rates": (1e-2, 1e8)})
    evaluation = evaluation_of(events_of(request(train=wild)))
    assert evaluation.diverged_members == 2
    assert evaluation.learning_rate == 1e-2
    assert [member.diverged for member in evaluation.members] == [False, False, True, True]


def test_a_backend_that_differs_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(family: str, backend: str, *_: object) -> None:
        raise KernelRefusedError(f"kernel '{family}', backend '{backend}' differs")

    monkeypatch.setattr(trial, "require", refuse)
    events = events_of(request())
    assert [type(event) for event in events] == [Started, Checked, Failed]
    failed = events[-1]
    assert isinstance(failed, Failed) and failed.failure is FailureClass.KERNEL_REFUSED
    assert "'sdpa' differs" in failed.message


def test_kernels_that_have_passed_on_such_a_device_are_not_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = [event for event in events_of(request()) if isinstance(event, Checked)]
    assert [(one.family, one.backend, one.ok) for one in checked] == [
        ("attention", "sdpa", True),
        ("head_loss", "blocked", True),
    ]
    assert {one.device_model for one in checked} == {device_model("cpu")}
    passed = tuple(one.key for one in checked)

    def find(family: str, *_: object) -> None:
        raise KernelRefusedError(f"{family} is checked")

    monkeypatch.setattr(trial, "find_verdict", find)
    known = [type(event) for event in events_of(request(kernels_passed=passed))]
    assert known == [Started, Rung, Rung, Evaluated, Profiled]
    assert "head_loss is checked" in failure_of(request(kernels_passed=passed[:1])).message
    other = TRAIN.model_copy(update={"precision": "bf16"})
    failed = failure_of(request(kernels_passed=passed, train=other))
    assert "attention is checked" in failed.message


def test_a_full_disk_says_nothing_about_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_name: str, _source: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trial, "add_plugin_source", full)
    failed = failure_of(request(plugins=(one_off("one_off_disk"),)))
    assert failed.failure is FailureClass.LOST and failed.failure.is_retried


def test_fresh_data_is_another_recipe_and_trains_otherwise() -> None:
    fresh = TRAIN.model_copy(update={"data": "fresh"})
    first, second = events_of(request(train=fresh)), events_of(request(train=fresh))
    assert untimed(evaluation_of(first)) == untimed(evaluation_of(second))
    fixed = evaluation_of(events_of(request()))
    assert evaluation_of(first).recipe_hash != fixed.recipe_hash
    assert evaluation_of(first).rungs[0].train_loss == fixed.rungs[0].train_loss  # one epoch in
    assert evaluation_of(first).rungs[1].train_loss != fixed.rungs[1].train_loss


@pytest.mark.parametrize("execution", [None, "eager", "captured"])
def test_a_request_says_how_steps_are_launched(
    execution: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    launcher = population.Launcher

    def noted(way: Execution, device: torch.device) -> Launcher:
        asked.append(way)
        return launcher(way, device)

    monkeypatch.setattr(population, "Launcher", noted)
    events_of(request(execution=execution))
    assert asked == [execution or "eager"]
