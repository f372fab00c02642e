"""Costs against hand counts, real modules and torch's own FLOP counter; limits in sentences."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.cost import (
    compute_dtype,
    flops_per_token,
    known_metrics,
    parameters,
    state_bytes,
    violations,
)
from archsearch.errors import PluginError
from archsearch.model import LanguageModel
from archsearch.registry import mixer_names
from archsearch.spec import Limit, Objective, StudySpec
from archsearch.study_file import load_study

WIDTH, VOCAB = 32, 64
QUICKSTART = Path(__file__).parent.parent / "studies" / "quickstart.yaml"


def stack(*mixers: str, ratio: float = 0.0) -> ArchSpec:
    return ArchSpec(
        width=WIDTH,
        layers=tuple(LayerSpec(mixer=mixer, fields={}) for mixer in mixers),
        channel_mixer=ChannelSpec(kind="swiglu", ratio=ratio) if ratio else ChannelSpec(),
    )


def study(**fields: object) -> StudySpec:
    return load_study(QUICKSTART).model_copy(update=fields)


def test_parameters_are_those_of_a_hand_count() -> None:
    conv = 3 * 32 + 32 + 32 * 32 + 32  # taps, bias, gate, its bias
    attention = 32 * 96 + 32 * 32
    norms = (2 + 1) * 64
    assert parameters(stack("base_conv", "attention"), VOCAB) == (
        64 * 32 + conv + attention + norms
    )
    mlp = 32 * 160 + 80 * 32 + 64  # gate and up, down, its norm; 2.5 times the width
    assert parameters(stack("attention", ratio=2.5), VOCAB) == (64 * 32 + attention + 2 * 64 + mlp)


@pytest.mark.parametrize("mixer", mixer_names())
def test_parameters_are_those_of_the_real_module(mixer: str) -> None:
    arch = stack(mixer, ratio=2.0)
    real = sum(parameter.numel() for parameter in LanguageModel(arch, VOCAB).parameters())
    assert parameters(arch, VOCAB) == real


def test_state_bytes_are_those_of_a_hand_count() -> None:
    arch = stack("base_conv", "attention")
    cache, tail, position = 2 * 128 * 32, 2 * 32, 8
    assert state_bytes(arch, 128, torch.float32) == 4 * (cache + tail) + position
    assert state_bytes(arch, 128, torch.bfloat16) == 2 * (cache + tail) + position
    assert state_bytes(stack("linear_attention"), 128, torch.bfloat16) == 4 * 153 * (32 + 1)


@pytest.mark.parametrize("ratio", [0.0, 2.0])
def test_flops_are_close_to_what_torch_counts(ratio: float) -> None:
    arch, context = stack("base_conv", "attention", ratio=ratio), 64
    model = LanguageModel(arch, VOCAB)  # reference backends: matrix products that torch counts
    tokens_BT = torch.randint(0, VOCAB, (1, context))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(tokens_BT))
    counted = counter.get_total_flops() / context
    # The reference multiplies the full square of scores, of which half is masked; the convolution,
    # about 300 FLOPs a token, is not a product that torch counts.
    masked = 4 * WIDTH * (context - 1) / 2
    assert flops_per_token(arch, VOCAB, context) == pytest.approx(counted - masked, rel=0.03)


def test_precision_decides_the_dtype_of_activations() -> None:
    assert compute_dtype("bf16") is torch.bfloat16
    assert compute_dtype("tf32") is compute_dtype("fp32") is torch.float32


def test_known_metrics_are_taken_where_the_objective_says() -> None:
    arch = stack("attention")
    at_128 = Objective(metric="state_bytes", direction="minimize", context=128)
    limit = Limit(metric="state_bytes", maximum=1, context=256)
    longest = study().task.longest
    found = known_metrics(arch, study(objectives=(at_128,), limits=(limit,)))
    assert found == {
        "state_bytes": state_bytes(arch, 128, torch.float32),
        "parameters": parameters(arch, VOCAB),
        "flops_per_token": flops_per_token(arch, VOCAB, longest),
    }
    open_context = known_metrics(arch, study())
    assert open_context["state_bytes"] == state_bytes(arch, longest, torch.float32)


@pytest.mark.parametrize("declared", [float("nan"), float("inf"), -1, "many", None])
def test_flops_that_are_no_finite_number_are_the_mixers_fault(
    monkeypatch: pytest.MonkeyPatch, declared: object
) -> None:
    arch = stack("attention")
    monkeypatch.setattr(type(arch.configs()[0]), "flops", lambda *_: declared)
    with pytest.raises(PluginError, match="expected a finite number"):
        flops_per_token(arch, VOCAB, 64)


def test_limits_broken_are_said_with_both_numbers() -> None:
    arch = stack("attention")
    limits = (
        Limit(metric="state_bytes", maximum=1000, context=128),
        Limit(metric="parameters", maximum=5000),
        Limit(metric="flops_per_token", maximum=1e9),
        Limit(metric="decode_ms", maximum=1e-9),
    )
    said = violations(arch, study(limits=limits))
    assert len(said) == 2
    for sentence, metric in zip(said, ("state_bytes", "parameters"), strict=True):
        assert sentence.startswith(metric)
    for context in (32, 128):  # on either side of the task's longest
        kept = state_bytes(arch, context, torch.float32)
        exact = Limit(metric="state_bytes", maximum=kept, context=context)
        assert violations(arch, study(limits=(exact,))) == ()
        below = exact.model_copy(update={"maximum": kept - 1})
        assert len(violations(arch, study(limits=(below,)))) == 1


def test_what_a_mixer_itself_excludes_is_a_violation() -> None:
    arch = ArchSpec(width=WIDTH, layers=(LayerSpec(mixer="attention", fields={"heads": 5}),))
    (sentence,) = violations(arch, study())
    assert "attention" in sentence and "heads is 5" in sentence
