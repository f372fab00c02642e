"""The check of kernels passes what is right and refuses each planted fault, with both numbers."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import archsearch_kernels
import pytest
import torch
from archsearch_kernels import Family, families, family
from torch import Tensor

from archsearch import kernel_check
from archsearch.errors import KernelRefusedError
from archsearch.kernel_check import (
    check,
    check_kernels,
    check_key,
    library_versions,
    require,
    source_hash,
)

Result = tuple[Tensor, Tensor | None]


def right(*inputs: Any, **options: Any) -> Result:
    result: Result = family("gated_delta").load("reference")(*inputs, **options)
    return result


def scaled(*inputs: Any, **options: Any) -> Result:
    y, state = right(*inputs, **options)
    return y * 1.01, state


def one_row_wrong(*inputs: Any, **options: Any) -> Result:
    y, state = right(*inputs, **options)
    return torch.cat((y[:, :-1], y[:, -1:] * 1.05), 1), state


def not_a_number(*inputs: Any, **options: Any) -> Result:
    y, state = right(*inputs, **options)
    return y + torch.where(torch.arange(y.shape[-1]) == 1, torch.nan, 0.0), state


def state_forgotten(*inputs: Any, **options: Any) -> Result:
    return right(*inputs, **{**options, "state_BHVK": None})


def wrong_final_state(*inputs: Any, **options: Any) -> Result:
    y, state = right(*inputs, **options)
    return y, None if state is None else state * 1.02


def gradient_of_key_scaled(q: Tensor, k: Tensor, *inputs: Any, **options: Any) -> Result:
    """The forward pass is right to the last bit."""
    return right(q, k + 0.02 * (k - k.detach()), *inputs, **options)


def gradient_of_state_lost(*inputs: Any, **options: Any) -> Result:
    state = options["state_BHVK"]
    if state is not None:
        options["state_BHVK"] = state.detach() + 0 * state
    return right(*inputs, **options)


def accumulates_in_bf16(*inputs: Any, **options: Any) -> Result:
    rounded = [x + (x.bfloat16().to(x) - x).detach() for x in inputs]
    return right(*rounded, **options)


def factors_rounded_to_bf16(*inputs: Any, **options: Any) -> Result:
    """What a matrix unit makes of fp32 factors, as far as the state shows it."""
    y, state = right(*inputs, **options)
    return y, None if state is None else state + (state.bfloat16().to(state) - state).detach()


def raises(*inputs: Any, **options: Any) -> Result:
    raise RuntimeError("no kernel image")


FAULTS: tuple[Callable[..., Result], ...] = (
    scaled,
    one_row_wrong,
    not_a_number,
    state_forgotten,
    wrong_final_state,
    gradient_of_key_scaled,
    gradient_of_state_lost,
    accumulates_in_bf16,
)


def test_a_backend_that_raises_is_refused_and_quoted(planted: Family) -> None:
    with pytest.raises(KernelRefusedError, match=r"which raised RuntimeError.*no kernel image"):
        require("gated_delta", "raises", "cpu", (6,))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """The gated delta family with the functions above as backends."""
    module = ModuleType("planted_backends")
    extra = (right, raises, factors_rounded_to_bf16)
    for function in (*extra, *FAULTS):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    one = family("gated_delta")
    names = {f.__name__: f"planted_backends:{f.__name__}" for f in (*extra, *FAULTS)}
    grown = replace(one, backends={**one.backends, **names})
    grown = replace(grown, op=lambda *a, backend, **o: grown_op(grown, backend, *a, **o))
    monkeypatch.setattr(kernel_check, "family", lambda name: grown)
    yield grown
    kernel_check._verdict.cache_clear()


def grown_op(one: Family, backend: str, *inputs: Any, **options: Any) -> Result:
    names = ("q_BTHK", "k_BTHK", "v_BTHV", "log_decay_BTH", "beta_BTH")
    arguments = [*inputs, *(options.pop(name) for name in names[len(inputs) :])]
    filled = {"state_BHVK": None, "keep_state": True, **options}
    result: Result = one.load(backend)(*arguments, **filled)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_backend_passes(planted: Family, dtype: torch.dtype) -> None:
    verdict = check(planted, "right", "cpu", (6,), dtype)
    assert verdict.ok and verdict.forward_error <= verdict.tolerance
    require("gated_delta", "right", "cpu", (6,), dtype)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_backend_is_refused_with_both_numbers(
    planted: Family, fault: Callable[..., Result]
) -> None:
    with pytest.raises(KernelRefusedError) as caught:
        require("gated_delta", fault.__name__, "cpu", (6,))
    text = str(caught.value)
    assert f"backend '{fault.__name__}' differs from its reference on cpu in float32" in text
    numbers = re.search(r"relative error (\S+) forward, (\S+) in gradients; (\S+) is", text)
    assert numbers is not None
    forward, gradient, allowed = (float(number) for number in numbers.groups())
    assert not max(forward, gradient) <= allowed < 1e-5
    if "gradient" in fault.__name__:
        assert forward <= allowed < gradient


@pytest.mark.parametrize("fault", ["scaled", "gradient_of_key_scaled", "wrong_final_state"])
def test_one_percent_is_seen_in_bf16_too(planted: Family, fault: str) -> None:
    assert not check(planted, fault, "cpu", (6,), torch.bfloat16).ok


def test_factors_rounded_to_bf16_pass_where_a_family_says_so(planted: Family) -> None:
    """The state is in fp32 and was exact; one percent is seen all the same."""
    name = factors_rounded_to_bf16.__name__
    assert not check(planted, name, "cpu", (6,), torch.bfloat16).ok
    backends = (name, "scaled", "wrong_final_state")
    said = replace(planted, operands=dict.fromkeys(backends, torch.bfloat16))
    assert check(said, name, "cpu", (6,), torch.bfloat16).ok
    assert not check(said, name, "cpu", (6,), torch.float32).ok
    for fault in ("scaled", "wrong_final_state"):
        assert not check(said, fault, "cpu", (6,), torch.bfloat16).ok


def test_a_borrowed_backend_is_checked_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def at_home(*inputs: Any, backend: str, **options: Any) -> Any:
        called.append(backend)
        return home.op(*inputs, backend="reference", **options)

    home, guest = family("taylor_linear_attention"), family("linear_attention")
    found = replace(home, op=at_home)
    monkeypatch.setattr(kernel_check, "family", lambda name: found)
    assert guest.borrowed == {"triton": home.name}
    assert guest.backends["triton"] == home.backends["triton"]
    assert check(guest, "triton", "cpu", (6,), torch.float32).ok
    assert called.count("triton") == 6  # three lengths, with and without a state


def test_unknown_backend_and_family_are_refused() -> None:
    with pytest.raises(KernelRefusedError, match="has no backend 'fla'; it has: reference"):
        require("gated_delta", "fla", "cpu")
    with pytest.raises(KernelRefusedError, match="no kernel family 'mamba'; there are: attention"):
        require("mamba", "reference", "cpu")


def test_every_backend_is_checked_in_every_dtype() -> None:
    verdicts = check_kernels("cpu", head_sizes=(6,), dtypes=(torch.float32, torch.bfloat16))
    expected = {
        (one.name, backend, dtype)
        for one in families()
        for backend in one.backends_on("cpu")
        for dtype in ("float32", "bfloat16")
        if backend != "reference"
    }
    assert {(v.family, v.backend, v.dtype) for v in verdicts} == expected
    assert all(verdict.ok for verdict in verdicts)


def test_a_verdict_is_kept_for_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("attention", "sdpa", "some device", (16, 20), torch.float32)
    keys = {check_key(*asked)}
    assert keys == {check_key(*asked)}
    others = ("short_conv", "chunked", "another device", (16,), torch.bfloat16)
    for place, other in enumerate(others):
        changed: list[Any] = list(asked)
        changed[place] = other
        keys.add(check_key(*changed))
    for name, other_function in (
        ("source_hash", lambda: "edited"),
        ("library_versions", lambda: {"torch": torch.__version__, "triton": "0.0"}),
        ("library_versions", lambda: {"torch": "0.0", "triton": library_versions()["triton"]}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kernel_check, name, other_function)
            keys.add(check_key(*asked))
    assert len(keys) == 9


def test_the_hash_of_kernels_follows_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "archsearch_kernels"
    shutil.copytree(archsearch_kernels.__path__[0], copy)
    before = source_hash()
    monkeypatch.setattr(archsearch_kernels, "__path__", [str(copy)])
    assert source_hash.__wrapped__() == before, "wherever they are installed"
    with (copy / "attention" / "sdpa.py").open("a") as file:
        file.write("# edited")
    assert source_hash.__wrapped__() != before
