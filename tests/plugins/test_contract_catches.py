"""The contract fails for each planted fault, in the tests that are about it and in no others.

The mixer is the example of docs/writing_mixers.md; a fault is a replacement in its source.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archsearch import registry
from archsearch.registry import add_plugin_file, load_mixer
from archsearch.testing import MixerContract

GUIDE = (Path(__file__).parents[2] / "docs" / "writing_mixers.md").read_text()
EXAMPLE, EXAMPLE_TEST, *_ = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)

SEGMENTS = "segments_equal_one_pass"
EXACT = "fp64_is_exact"
LONG = "fp64_is_exact_across_chunks"
STEPS = "steps_equal_one_pass"
FORWARD = "forward_equals_mix_from_the_empty_state"
AT = "outputs_at_positions_are_those_of_the_whole"
CAUSAL = "no_token_sees_a_later_one"
APART = "sequences_do_not_touch_each_other"
STATE = "state_kept_is_the_state_declared"
MODULE = "module_keeps_nothing_of_the_past"
GIVEN = "mix_leaves_its_state_as_it_was"
GRADIENTS = "gradients_are_finite"
BF16 = "bf16_is_close_to_fp32"
HOST = "step_reads_nothing_back"
FLOPS = "flops_are_close_to_a_count"
POPULATION = "population_equals_separate_modules"
CORNERS = "every_corner_builds_or_says_why_not"
FORMS = "equal_configs_have_one_canonical_form"

SPEC = '(StateTensor("memory", (self.d_model,), accumulator(dtype)),)'
SPARE = (
    '(*(StateTensor(name, (self.d_model,), accumulator(dtype)) for name in ("memory", "spare")),)'
)
NEW_STATE = '{"memory": memory_BTD[:, -1].clone()}'
MIX = "        decay, value_BTD ="
STEP = '        state["memory"].mul_(self.config.decay)'
INNER = "        self.inner ="
VALUE = "self.inner(x_BTD).to(compute)"
RESULT = "return self.out(memory_BTD.to(x_BTD.dtype))"
RULE = "            if self.half_life < 1:"
DECAY = "        @property\n        def decay"
IMPORT = "from dataclasses import dataclass"
CANONICAL = """\
        def canonical(self) -> "RunningMean.Config":
            return replace(self, half_life=%s)

"""
FORWARD_OF = """\
    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.mix(x_BTD, self.init_state(len(x_BTD), 1, x_BTD.dtype, x_BTD.device))[0]
        return """

OUTPUTS_AT = """\
    def outputs_at(self, x_BTD: Tensor, at_BK: Tensor) -> Tensor:
        from archsearch.mixer import rows
        return """

FAULTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "declares the compute dtype for a recurrent state": (
        {SPEC: SPEC.replace("accumulator(dtype)", "dtype")},
        {STATE},
    ),
    "declares twice the state it keeps": (
        {
            SPEC: SPEC.replace("(self.d_model,)", "(2, self.d_model)"),
            'state["memory"]': 'state["memory"][:, 0]',
        },
        {
            STATE,
            SEGMENTS,
            STEPS,
            EXACT,
            LONG,
            APART,
            GIVEN,
            CAUSAL,
            MODULE,
        },  # no second segment fits
    ),
    "the state is rounded to fp32 between fp64 segments": (
        {NEW_STATE: NEW_STATE.replace(".clone()", ".clone().float().to(compute)")},
        {EXACT, LONG},
    ),
    "keeps a tensor that is not declared": (
        {NEW_STATE: NEW_STATE.replace("}", ', "count": torch.zeros(len(x_BTD))}')},
        {STATE},
    ),
    "keeps the whole segment alive through a view": (
        {NEW_STATE: NEW_STATE.replace(".clone()", "")},
        {STATE},
    ),
    "mask leaks one token": (
        {"age_TT >= 0": "age_TT >= -1"},
        {CAUSAL, SEGMENTS, STEPS, EXACT, LONG, APART},
    ),
    "one pass over many tokens forgets the oldest": (
        {"age_TT >= 0": "(age_TT >= 0) & (age_TT < 150)"},
        {LONG},
    ),
    "step forgets to decay": (
        {".mul_(self.config.decay)": ""},
        {STEPS, EXACT},
    ),
    "mix forgets the given state": (
        {'* state["memory"][:, None]': '* 0 * state["memory"][:, None]'},
        {SEGMENTS, EXACT, LONG, APART},
    ),
    "mix writes into the given state": (
        {NEW_STATE: '{"memory": state["memory"].copy_(memory_BTD[:, -1])}'},
        {GIVEN, POPULATION},  # and vmap cannot write many members into one tensor
    ),
    "the new state shares memory with the given one": (
        {
            SPEC: SPARE,
            NEW_STATE: NEW_STATE.replace("}", ', "spare": state["spare"]}'),
            STEP: '        state["spare"].add_(1)\n' + STEP,
        },
        {GIVEN},
    ),
    "forward differs from mix": (
        {"    def step": FORWARD_OF + "1.001 * y_BTD\n\n    def step"},
        {FORWARD, EXACT, LONG},
    ),
    "outputs at positions are those of the first ones": (
        {"    def step": OUTPUTS_AT + "self(x_BTD)[:, : at_BK.shape[1]]\n\n    def step"},
        {AT},
    ),
    "outputs at positions pass no gradient back to tokens before": (
        {"    def step": OUTPUTS_AT + "rows(self(x_BTD.detach()), at_BK)\n\n    def step"},
        {AT},
    ),
    "the module remembers the last segment": (
        {MIX: "        self.last = x_BTD.detach()[:, -1]\n" + MIX},
        {MODULE},
    ),
    "a buffer counts the calls": (
        {
            INNER: '        self.register_buffer("calls", torch.zeros(()))\n' + INNER,
            MIX: "        self.calls.add_(1)\n" + MIX,
        },
        {MODULE},
    ),
    "sequences of a batch are centred together": (
        {
            "self.inner(x_BTD)": "self.inner(x_BTD - x_BTD.mean(0))",
            "self.inner(x_BD)": "self.inner(x_BD - x_BD.mean(0))",
        },
        {APART},
    ),
    "a parameter is never used": (
        {INNER: "        self.spare = nn.Linear(2, 2)\n" + INNER},
        {GRADIENTS, POPULATION, AT},
    ),
    "a gradient is not a number": (
        {VALUE: f"torch.where({VALUE} > -1e9, {VALUE}, {VALUE}.sqrt())"},
        {GRADIENTS, POPULATION, AT},
    ),
    "the result is in another dtype": (
        {RESULT + ",": RESULT + ".float(),"},
        {BF16, EXACT},
    ),
    "bf16 is rounded far more than once": (
        {VALUE: f"{VALUE} + (x_BTD.itemsize == 2) * 0.2 * {VALUE}.detach().sign()"},
        {BF16},
    ),
    "step asks for a value": (
        {STEP: "        assert float(x_BD.sum()) < 1e30\n" + STEP},
        {HOST},
    ),
    "mix branches on a value": (
        {MIX: "        assert x_BTD.sum() < 1e30\n" + MIX},
        {POPULATION},
    ),
    "flops counts a multiply-add as one": (
        {"4 * self.d_model**2": "2 * self.d_model**2"},
        {FLOPS},
    ),
    "flops grows with the context where the work does not": (
        {"4 * self.d_model**2 +": "4 * self.d_model**2 + 8 * context_len +"},
        {FLOPS},
    ),
    "flops counts the projections twice": (
        {"4 * self.d_model**2": "8 * self.d_model**2"},
        {FLOPS},
    ),
    "a field makes no difference": (
        {RULE: RULE.replace("1:", "self.spare:"), DECAY: "        spare: int = 1\n\n" + DECAY},
        {FORMS},
    ),
    "a field that matters is left out of the canonical form": (
        {IMPORT: IMPORT + ", replace", DECAY: CANONICAL % "8" + DECAY},
        {FORMS},
    ),
    "a canonical form has another one": (
        {IMPORT: IMPORT + ", replace", DECAY: CANONICAL % "2 * self.half_life" + DECAY},
        {FORMS},
    ),
    "a corner of the ranges breaks": (
        {RULE: "            1 // (self.half_life - 32)\n" + RULE},
        {CORNERS},
    ),
}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a plugin file and register it; the registry forgets it afterwards."""
    monkeypatch.setattr(registry, "_files", {})
    load_mixer.cache_clear()

    def add(source: str, name: str = "running_mean") -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        return add_plugin_file(path)

    yield add
    load_mixer.cache_clear()
    for module in [name for name in sys.modules if name.endswith("_running_mean")]:
        del sys.modules[module]


def failing_tests(contract: type[MixerContract]) -> dict[str, Exception]:
    failures = {}
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                getattr(contract(), name)()
            except Exception as error:
                failures[name.removeprefix("test_")] = error
    return failures


def contract_of(name: str) -> type[MixerContract]:
    return type("Planted", (MixerContract,), {"mixer": name})


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_fails_where_it_should(plugin: Callable[[str], str], fault: str) -> None:
    replacements, expected = FAULTS[fault]
    source = EXAMPLE
    for old, new in replacements.items():
        assert old in source, f"the example has no {old!r} to replace"
        source = source.replace(old, new)
    failures = failing_tests(contract_of(plugin(source)))
    assert set(failures) == expected, {name: repr(error) for name, error in failures.items()}


def test_the_example_of_the_guide_keeps_the_contract(plugin: Callable[[str], str]) -> None:
    assert failing_tests(contract_of(plugin(EXAMPLE))) == {}


def test_a_failure_names_the_mixer_and_both_values(plugin: Callable[[str], str]) -> None:
    name = plugin(EXAMPLE.replace("4 * self.d_model**2", "2 * self.d_model**2"))
    message = str(failing_tests(contract_of(name))[FLOPS])
    assert re.fullmatch(
        r"mixer 'running_mean': flops\(33\) declares 2112 a token; counted: \d+ to \d+", message
    )


def test_pytest_collects_the_contract_as_the_guide_says(tmp_path: Path) -> None:
    """In a folder of its own, as a third party would run it."""
    (tmp_path / "running_mean.py").write_text(EXAMPLE)
    (tmp_path / "test_running_mean.py").write_text(EXAMPLE_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "18 passed" in out.stdout, out.stdout + out.stderr
