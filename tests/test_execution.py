"""A traced step gives the numbers of the step itself, for every mixer and for other data."""

import pytest
import torch
from torch import Tensor

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.execution import Launcher, default_execution, traced
from archsearch.group import Group
from archsearch.members import Member
from archsearch.model import resolve_backends
from archsearch.population import Population
from archsearch.recipes import RECIPES
from archsearch.registry import mixer_names

MEMBERS = (Member(1e-2, 0), Member(1e-3, 1))
TRAIN = RECIPES["tiny"].train.model_copy(update={"embed_dropout": 0.1})
VOCAB = 32


def group_of(mixer: str) -> Group:
    layers = tuple(LayerSpec(mixer=name, fields={}) for name in ("base_conv", mixer))
    arch = ArchSpec(width=32, layers=layers)
    backends = resolve_backends(arch, "cpu", torch.float32)
    given = (arch, VOCAB, MEMBERS, TRAIN, 0, "cpu", backends, torch.float64)
    return Population(*given).groups[0]


def batch(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    weights_N = torch.rand(8, generator=generator, dtype=torch.float64)
    return numbers(VOCAB, 4, 16), numbers(16, 4, 2), numbers(VOCAB, 8), weights_N, numbers(999, 2)


@pytest.mark.parametrize("mixer", mixer_names())
def test_a_trace_is_the_step(mixer: str) -> None:
    group = group_of(mixer)
    state = (group.parameters, group.buffers)
    graph = traced(group.model.gradients, *state, *batch(0))
    for seed in (0, 1):
        found = graph(*state, *batch(seed))
        wanted = group.model.gradients(*state, *batch(seed))
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_trace_reads_its_arguments() -> None:
    """The comparison above can fail: with other parameters the numbers differ."""
    group = group_of("attention")
    state = (group.parameters, group.buffers)
    graph = traced(group.model.gradients, *state, *batch(0))
    before = graph(*state, *batch(0))[0]
    group.flat_MP.mul_(1.01)
    assert not before.equal(graph(*state, *batch(0))[0])


def test_how_work_is_launched_by_default() -> None:
    assert default_execution(torch.device("cpu")) == "eager"
    assert default_execution(torch.device("cuda")) == "compiled"


def test_an_eager_launcher_calls_what_it_is_given() -> None:
    launcher = Launcher("eager", torch.device("cpu"))
    count = torch.zeros(())
    for step in range(3):
        launcher.run("work", lambda: count.add_(launcher.compiled("f", torch.neg, count) + 2), ())
        assert count == [2, 2, 2][step]
