"""MixerContract: every promise of `archsearch.mixer.Mixer` as a test.

Parameters are moved off their initial values, so that nothing hides behind a zero or a very small
weight. Tolerances are multiples of what one rounding does (`measure.rounding_changes`). Knows
nothing of models, tasks or training.

Shape suffixes: B batch, T tokens, D model width, M members of a population.
"""

import itertools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from archsearch_kernels import resolve
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer, State
from archsearch.registry import load_mixer, make_config, mixer_fields
from archsearch.space import Parts, Value
from archsearch.testing.flops import decoding_flops
from archsearch.testing.measure import (
    forward,
    gradients,
    in_segments,
    in_steps,
    inputs,
    rms,
    rounding_changes,
    runs_at,
    segmentations,
    tensors_of,
)
from archsearch.testing.sameness import complaints

BATCH = 3
LENGTHS = (1, 7, 33)
"""Tokens of the sequences tried: one, fewer than any block, and one more than a power of two."""

LONG = 300
"""Tokens of one sequence tried alone: more than one chunk of any kernel of ours."""

REORDERED = 16.0
"""Roundings that two orders of the same fp32 sum may differ by: about 30 terms, all one way."""

ROUNDED = 4.0
"""Input-sized roundings of a bf16 pass: some ten results are rounded on the way, and independent
errors add as the root of their squares; twice that."""

EXACT = 1e-10
"""Relative error allowed in fp64: 16 digits, of which sums in another order lose a few."""

FLOPS_SLACK = 0.1
"""Share by which declared FLOPs may leave the counted band: what is shared between tokens."""


class MixerContract:
    """Every promise of `archsearch.mixer.Mixer`, one test each."""

    mixer: ClassVar[str]
    """Name of the mixer under test."""
    fields: ClassVar[Mapping[str, Value]] = MappingProxyType({})
    """Values of its fields; those not given take their defaults."""
    parts: ClassVar[Parts] = ()
    """Its parts if it is made of mixers; none given means the default ones."""
    width: ClassVar[int] = 32
    backends: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Backend of each kernel family; those not given are what `auto` means on a CPU."""

    def test_segments_equal_one_pass(self) -> None:
        module = self._build()
        for length in LENGTHS:
            x_BTD = inputs(BATCH, length, self.width)
            whole, _ = module.mix(x_BTD, self._empty(module, length))
            for cuts in segmentations(length, module.config.prefix_len):
                y_BTD = in_segments(module, x_BTD, cuts)
                self._expect_close(module, x_BTD, y_BTD, whole, f"segments {cuts}")

    def test_steps_equal_one_pass(self) -> None:
        module = self._build()
        for length in LENGTHS:
            x_BTD = inputs(BATCH, length, self.width)
            whole, _ = module.mix(x_BTD, self._empty(module, length))
            together = min(module.config.prefix_len, length)
            for first in {together, max(together, length // 2)}:
                y_BTD = in_steps(module, x_BTD, first)
                what = f"{first} tokens at once, then {length - first} steps"
                self._expect_close(module, x_BTD, y_BTD, whole, what)

    def test_fp64_is_exact(self) -> None:
        """Segments, steps and one pass differ by roundings and by nothing else."""
        module = self._build().double()
        length = LENGTHS[-1]
        x_BTD = inputs(BATCH, length, self.width).double()
        whole, _ = module.mix(x_BTD, self._empty(module, length, torch.float64))
        prefix = module.config.prefix_len
        found = {f"segments {cuts}": cuts for cuts in segmentations(length, prefix)}
        runs = {what: in_segments(module, x_BTD, cuts) for what, cuts in found.items()}
        runs["steps"] = in_steps(module, x_BTD, min(prefix, length))
        runs["forward"] = module(x_BTD)
        for what, y_BTD in runs.items():
            self._expect(y_BTD.dtype == torch.float64, f"fp64 in, {y_BTD.dtype} out of {what}")
            self._expect_within(y_BTD, whole, EXACT * rms(whole), f"fp64, {what}")

    def test_fp64_is_exact_across_chunks(self) -> None:
        """The same for a sequence that chunked kernels cut, and whose segments they need not."""
        module = self._build().double()
        x_1TD = inputs(BATCH, LONG, self.width).double()[:1]
        first = max(module.config.prefix_len, LONG * 2 // 3)
        states = (module.init_state(1, LONG, torch.float64, "cpu") for _ in range(2))
        with torch.no_grad():
            whole, _ = module.mix(x_1TD, next(states))
            before, state = module.mix(x_1TD[:, :first], next(states))
            parts = [before, module.mix(x_1TD[:, first:], state)[0]] if first < LONG else [before]
            runs = {"segments": torch.cat(parts, 1), "forward": module(x_1TD)}
        for what, y_1TD in runs.items():
            self._expect_within(y_1TD, whole, EXACT * rms(whole), f"fp64, {LONG} tokens, {what}")

    def test_forward_equals_mix_from_the_empty_state(self) -> None:
        module = self._build()
        for length in LENGTHS:
            x_BTD = inputs(BATCH, length, self.width)
            y_BTD = module(x_BTD)
            self._expect(y_BTD.shape == x_BTD.shape, f"forward returns {tuple(y_BTD.shape)}")
            expected, _ = module.mix(x_BTD, self._empty(module, length))
            self._expect_close(module, x_BTD, y_BTD, expected, "forward")

    def test_outputs_at_positions_are_those_of_the_whole(self) -> None:
        module = self._build()
        for length in LENGTHS:
            x_BTD = inputs(BATCH, length, self.width)
            at_BK = inputs(BATCH, length, 1, seed=2).argsort(1)[:, : (length + 1) // 2, 0]
            some, whole = runs_at(at_BK)
            changes = rounding_changes(whole, module, x_BTD, torch.float32)
            names = ("outputs", "gradient of x", *(name for name, _ in module.named_parameters()))
            found = zip(names, some(module, x_BTD), whole(module, x_BTD), changes, strict=True)
            for name, mine, theirs, unit in found:
                what = f"outputs at some of {length} positions, {name}"
                self._expect_within(mine, theirs, REORDERED * unit, what)

    def test_no_token_sees_a_later_one(self) -> None:
        module = self._build()
        length = LENGTHS[-1]
        x_BTD = inputs(BATCH, length, self.width)
        before = inputs(BATCH, 5, self.width, seed=1)
        _, middle = module.mix(before, self._empty(module, length + 5))
        passes: dict[str, Callable[[Tensor], Tensor]] = {
            "forward": module,
            "mix": lambda x: module.mix(x, {name: s.clone() for name, s in middle.items()})[0],
        }
        for name, run in passes.items():
            before = run(x_BTD)
            together = module.config.prefix_len if name == "forward" else 0
            changed_at = {max(together, t) for t in (1, length // 2, length - 1)}
            for t in sorted(t for t in changed_at if t < length):
                changed = x_BTD.clone()
                changed[:, t] += 10.0
                after = run(changed)
                self._expect(
                    torch.equal(after[:, :t], before[:, :t]),
                    f"{name}: an output before token {t} depends on token {t}",
                )

    def test_sequences_do_not_touch_each_other(self) -> None:
        module = self._build()
        length = LENGTHS[-1]
        x_BTD = inputs(BATCH, length, self.width)
        y_BTD = module(x_BTD)
        for row in range(BATCH):
            alone = module(x_BTD[row : row + 1])
            self._expect_close(module, x_BTD, y_BTD[row : row + 1], alone, f"row {row} of a batch")
        other = inputs(BATCH, length, self.width, seed=1)
        states = [self._empty(module, length) for _ in range(2)]
        mine = []
        cuts = next(segmentations(length, module.config.prefix_len))
        for first, second in zip(x_BTD.split(cuts, 1), other.split(cuts, 1), strict=True):
            part, states[0] = module.mix(first, states[0])
            mine.append(part)
            _, states[1] = module.mix(second, states[1])
        what = "a sequence mixed in turns with another"
        undisturbed, _ = module.mix(x_BTD, self._empty(module, length))
        self._expect_close(module, x_BTD, torch.cat(mine, 1), undisturbed, what)

    def test_state_kept_is_the_state_declared(self) -> None:
        for dtype, context in itertools.product((torch.float32, torch.bfloat16), LENGTHS):
            module = self._build().to(dtype)
            x_BTD = inputs(BATCH, context, self.width).to(dtype)
            empty = self._empty(module, context, dtype)
            self._expect_declared(module, empty, context, dtype, "init_state")
            _, mixed = module.mix(x_BTD, empty)
            self._expect_declared(module, mixed, context, dtype, f"mix of {context} tokens")
            stepped = self._empty(module, context, dtype)
            for x_BD in x_BTD.unbind(1):
                _, stepped = module.step(x_BD, stepped)
            self._expect_declared(module, stepped, context, dtype, f"{context} steps")

    def test_module_keeps_nothing_of_the_past(self) -> None:
        module = self._build()
        before = dict(tensors_of(module))
        x_BTD = inputs(BATCH, 7, self.width)
        module(x_BTD)
        _, state = module.mix(x_BTD, self._empty(module, 9))
        for _ in range(2):
            _, state = module.step(x_BTD[:, 0], state)
        after = dict(tensors_of(module))
        extra = sorted(after.keys() - before.keys())
        self._expect(not extra, f"the module holds new tensors after use: {', '.join(extra)}")
        for name, tensor in before.items():
            same = name in after and torch.equal(tensor, after[name])
            self._expect(same, f"'{name}' of the module changed in use; the state is the place")

    def test_mix_leaves_its_state_as_it_was(self) -> None:
        module = self._build()
        x_BTD = inputs(BATCH, 9, self.width)
        _, given = module.mix(x_BTD[:, :4], self._empty(module, 9))
        before = {name: tensor.clone() for name, tensor in given.items()}
        _, state = module.mix(x_BTD[:, 4:8], given)
        self._expect_same(given, before, "mix edits the state it is given")
        module.step(x_BTD[:, 8], state)  # may edit its own state, and nothing else
        self._expect_same(given, before, "the state mix returns shares memory with the one given")

    def test_gradients_are_finite(self) -> None:
        module = self._build()
        for length in LENGTHS:
            x_BTD = inputs(BATCH, length, self.width).requires_grad_()
            (module(x_BTD) * inputs(BATCH, length, self.width, seed=1)).sum().backward()
            for name, tensor in (("x", x_BTD), *module.named_parameters()):
                found = tensor.grad
                self._expect(found is not None, f"{name} gets no gradient from forward")
                finite = found is not None and bool(found.isfinite().all())
                self._expect(finite, f"the gradient of {name} is not finite at {length} tokens")

    def test_bf16_is_close_to_fp32(self) -> None:
        narrow = self._build().bfloat16()
        wide = self._build()
        wide.load_state_dict({name: p.float() for name, p in narrow.state_dict().items()})
        for length in LENGTHS:
            x_BTD = inputs(BATCH, length, self.width).bfloat16()
            y_BTD = narrow(x_BTD)
            self._expect(y_BTD.dtype == torch.bfloat16, f"bf16 in, {y_BTD.dtype} out")
            wide_x = x_BTD.float()
            (unit,) = rounding_changes(forward, wide, wide_x, torch.bfloat16)
            what = f"bf16, {length} tokens"
            self._expect_within(y_BTD.float(), wide(wide_x), ROUNDED * unit, what)

    def test_step_reads_nothing_back(self) -> None:
        module = self._build().to("meta")
        state = module.init_state(BATCH, 9, torch.float32, "meta")
        try:
            module.step(torch.empty(BATCH, self.width, device="meta"), state)
        except (RuntimeError, NotImplementedError) as error:
            raise AssertionError(
                f"{self._who}: step needs values on the host, so no decode loop can be captured "
                f"(it fails on tensors without values: {error})"
            ) from error

    def test_flops_are_close_to_a_count(self) -> None:
        """Declared FLOPs, and their growth with the context, lie between the matrix products of
        decoding and all its arithmetic, both at the reference backend."""
        module = self._build(reference=True)
        _, few, many = LENGTHS
        long, short = (decoding_flops(module, length) for length in (many, few))
        grown = [after - before for before, after in zip(short, long, strict=True)]
        flops = module.config.flops
        for what, declared, counted in (
            (f"flops({many}) declares", flops(many), long),
            (f"from {few} to {many} tokens flops grows by", flops(many) - flops(few), grown),
        ):
            low, high = sorted(counted)
            low, high = low - FLOPS_SLACK * abs(low) - 1, high + FLOPS_SLACK * abs(high) + 1
            self._expect(
                low <= declared <= high,
                f"{what} {declared} a token; counted: {low:.0f} to {high:.0f}",
            )

    def test_population_equals_separate_modules(self) -> None:
        members = [self._build(seed=seed) for seed in range(3)]
        stacked, buffers = stack_module_state(members)

        def one(parameters: dict[str, Tensor], held: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
            y_BTD: Tensor = functional_call(members[0], {**parameters, **held}, (x_BTD,))
            return y_BTD

        for length in LENGTHS:
            x_MBTD = torch.stack([inputs(BATCH, length, self.width, seed=m) for m in range(3)])
            with warnings.catch_warnings():  # a loop over the members would be no population
                warnings.filterwarnings("error", message=".*performance drop")
                y_MBTD = vmap(one)(stacked, buffers, x_MBTD)
            grads = torch.autograd.grad(y_MBTD.square().sum() / 2, list(stacked.values()))
            for m, (member, x_BTD) in enumerate(zip(members, x_MBTD, strict=True)):
                what = f"member {m} of a population, {length} tokens"
                self._expect_close(member, x_BTD, y_MBTD[m], member(x_BTD), what)
                changes = rounding_changes(gradients, member, x_BTD, torch.float32)
                own = gradients(member, x_BTD)
                for name, mine, theirs, unit in zip(stacked, own, grads, changes, strict=True):
                    what_of = f"{what}, gradient of {name}"
                    self._expect_within(theirs[m], mine, REORDERED * unit, what_of)

    def test_every_corner_builds_or_says_why_not(self) -> None:
        declared = mixer_fields(self.mixer)
        ends = [{field.candidates[0], field.candidates[-1]} for field in declared.values()]
        built = 0
        for values in itertools.product(*ends):
            chosen = dict(zip(declared, values, strict=True))
            try:
                config = make_config(self.mixer, self.width, chosen, self.parts)
            except InfeasibleError:
                continue
            built += 1
            y_BTD = load_mixer(self.mixer)(config)(inputs(BATCH, 3, self.width))
            self._expect(bool(y_BTD.isfinite().all()), f"{chosen}: the output is not finite")
            self._expect(config.flops(7) > 0, f"{chosen}: flops(7) is {config.flops(7)}")
        self._expect(built > 0, f"no corner of the declared ranges fits width {self.width}")

    def test_equal_configs_have_one_canonical_form(self) -> None:
        config, x_BTD = self._build().config, inputs(BATCH, LENGTHS[-1], self.width)
        for complaint in complaints(self.mixer, config, self._build_one, x_BTD):
            self._expect(False, complaint)

    @property
    def _who(self) -> str:
        named = [f"{name}={value}" for name, value in self.fields.items()]
        named[:0] = ["+".join(part.mixer for part in self.parts)] if self.parts else []
        fields = ", ".join(named)
        return f"mixer '{self.mixer}' ({fields})" if fields else f"mixer '{self.mixer}'"

    def _build(self, seed: int = 0, reference: bool = False) -> Mixer:
        config = make_config(self.mixer, self.width, self.fields, self.parts)
        return self._build_one(config, seed, reference)

    def _build_one(self, config: Mixer.Config, seed: int = 0, reference: bool = False) -> Mixer:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            module = load_mixer(self.mixer)(config)
            for parameter in module.parameters():
                fan_in = parameter.shape[-1] if parameter.dim() > 1 else 16
                parameter.add_(torch.randn_like(parameter), alpha=0.5 * fan_in**-0.5)
        for mixer in [] if reference else module.modules():
            if isinstance(mixer, Mixer):
                mixer.backends = {
                    name: self.backends.get(name) or resolve(name, "cpu", torch.float32, allowed)
                    for name, allowed in mixer.kernels.items()
                }
        return module

    def _empty(self, module: Mixer, context: int, dtype: torch.dtype = torch.float32) -> State:
        return module.init_state(BATCH, context, dtype, "cpu")

    def _expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise AssertionError(f"{self._who}: {otherwise}")

    def _expect_within(self, actual: Tensor, expected: Tensor, allowed: float, what: str) -> None:
        error = rms(actual - expected)
        self._expect(
            error <= allowed,
            f"{what}: off by {error:.3g} (root mean square); {allowed:.3g} is allowed",
        )

    def _expect_close(
        self, module: Mixer, x_BTD: Tensor, actual: Tensor, expected: Tensor, what: str
    ) -> None:
        (unit,) = rounding_changes(forward, module, x_BTD, torch.float32)
        self._expect_within(actual, expected, REORDERED * unit, what)

    def _expect_same(self, state: State, before: State, otherwise: str) -> None:
        for name, tensor in before.items():
            self._expect(torch.equal(state[name], tensor), f"{otherwise}: '{name}' changed")

    def _expect_declared(
        self, module: Mixer, state: State, context: int, dtype: torch.dtype, after: str
    ) -> None:
        declared = {
            part.name: (BATCH, *part.shape, part.dtype)
            for part in module.config.state_spec(context, dtype)
        }
        kept = {name: (*tensor.shape, tensor.dtype) for name, tensor in state.items()}
        self._expect(
            kept == declared,
            f"after {after} at context {context} the state is {kept}; declared is {declared}",
        )
        for name, tensor in state.items():
            held, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.itemsize
            self._expect(
                held == needed,
                f"after {after} '{name}' is a view that keeps {held} bytes for its {needed}",
            )
