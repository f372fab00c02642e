"""Profiles: state really held, peak memory, the points asked for, plugins that keep too much."""

from pathlib import Path

import pytest
import torch
from one_off import KEEPS_A_VIEW, KEEPS_MORE, one_off, stored_arch

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.cost import compute_dtype, parameters, state_bytes
from archsearch.device import device_model
from archsearch.errors import PluginError
from archsearch.messages import ProfileSpec
from archsearch.model import resolve_backends
from archsearch.profile import profile
from archsearch.registry import add_plugin_file, forget_plugin_file, mixer_names

WIDTH, VOCAB = 16, 24
SPEC = ProfileSpec(prefill=((2, 24), (1, 8)), decode=((1, 24), (4, 24), (1, 3)), exclusive=False)


def stack(*mixers: str) -> ArchSpec:
    layers = tuple(LayerSpec(mixer=mixer, fields={}) for mixer in mixers)
    return ArchSpec(width=WIDTH, layers=layers)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mixer", mixer_names())
def test_state_held_is_the_declared_one(mixer: str, precision: str) -> None:
    arch, dtype = stack("base_conv", mixer), compute_dtype(precision)
    backends = resolve_backends(arch, "cpu", dtype)
    spec = ProfileSpec(prefill=(), decode=((1, 24), (1, 3)), exclusive=True)
    found = profile(arch, VOCAB, spec, precision, "cpu", backends)
    assert found.state_bytes == {n: state_bytes(arch, n, dtype) for n in (24, 3)}


def test_every_point_asked_for_is_there_in_order() -> None:
    found = profile(stack("attention"), VOCAB, SPEC, "fp32", "cpu")
    assert [(point.batch, point.context) for point in found.prefill] == list(SPEC.prefill)
    assert [(point.batch, point.context) for point in found.decode] == list(SPEC.decode)
    for point in (*found.prefill, *found.decode):
        assert point.median_ms > 0 and point.iqr_ms >= 0 and point.repeats >= 5
    assert found.arch_hash == stack("attention").arch_hash
    assert found.device_model == device_model("cpu") != ""
    assert found.threads == torch.get_num_threads()
    assert found.exclusive is False


def test_decode_is_per_step_and_prefill_per_pass() -> None:
    spec = ProfileSpec(prefill=((4, 1024),), decode=((1, 1024),), exclusive=False)
    found = profile(stack("attention"), VOCAB, spec, "fp32", "cpu")
    # A pass over 4 x 1024 tokens is thousands of times the work of one token in one sequence.
    assert found.prefill[0].median_ms > 2 * found.decode[0].median_ms


def test_peak_memory_is_the_same_twice_and_grows_with_the_batch() -> None:
    arch = stack("base_conv", "attention")

    def peak(batch: int) -> int:
        spec = ProfileSpec(prefill=((batch, 64),), decode=(), exclusive=False)
        return profile(arch, VOCAB, spec, "fp32", "cpu").peak_memory_bytes

    weights, state = 4 * parameters(arch, VOCAB), state_bytes(arch, 64, torch.float32)
    one, again, eight = peak(1), peak(1), peak(8)
    assert one == again
    # The empty state and the one after the pass live at once.
    assert one > weights + 2 * state
    assert eight > one + 7 * 2 * state
    assert eight < 8 * one  # the weights are there once


def test_random_state_of_the_process_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    profile(stack("gated_delta"), VOCAB, SPEC, "fp32", "cpu")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("one_off_more", KEEPS_MORE, "declares a state of 64 bytes at context 24 and keeps 128"),
        (
            "one_off_view",
            KEEPS_A_VIEW,
            "declares a state of 64 bytes at context 24 and keeps 1,024",
        ),
    ],
)
def test_state_that_is_not_declared_is_the_plugin_s_error(
    name: str, fault: dict[str, str], said: str, tmp_path: Path
) -> None:
    plugin = one_off(name, fault)
    (tmp_path / f"{name}.py").write_text(plugin.source)
    add_plugin_file(tmp_path / f"{name}.py")
    spec = ProfileSpec(prefill=(), decode=((1, 24),), exclusive=False)
    try:
        with pytest.raises(PluginError, match=said):
            profile(stored_arch(name), VOCAB, spec, "fp32", "cpu")
    finally:
        forget_plugin_file(name)
