"""What a population needs is counted before it is made, and a small device gets it in groups."""

import pytest
import torch

from archsearch import memory
from archsearch.arch import ArchSpec, LayerSpec
from archsearch.group import Group
from archsearch.members import members_of
from archsearch.memory import available_bytes, members_together, population_bytes
from archsearch.messages import Evaluated, ProfileSpec, TrialRequest
from archsearch.model import resolve_backends
from archsearch.mqar import generate
from archsearch.population import Population
from archsearch.registry import mixer_names
from archsearch.spec import MqarSpec, Segment, TrainSpec
from archsearch.trial import run_trial

TASK = MqarSpec(
    recipe="custom",
    vocab_size=64,
    train=(Segment(length=16, pairs=2, examples=32), Segment(length=32, pairs=4, examples=64)),
    test=(Segment(length=32, pairs=4, examples=40),),
)
TRAIN = TrainSpec(
    learning_rates=(1e-2, 1e-3), seeds=2, epochs=2, batch_size=16, test_batch_size=16, rungs=2
)
CPU = torch.device("cpu")


def stack(*mixers: str) -> ArchSpec:
    return ArchSpec(width=32, layers=tuple(LayerSpec(mixer=name, fields={}) for name in mixers))


def needed(arch: ArchSpec, members: int, exact: bool = False) -> int:
    backends = resolve_backends(arch, "cpu", torch.float32)
    return population_bytes(arch, TASK, TRAIN, CPU, backends, members, exact)


def really_alive(arch: ArchSpec) -> int:
    """Peak of a real step of the largest batch."""
    backends = resolve_backends(arch, "cpu", torch.float32)
    given = (arch, TASK.vocab_size, members_of(TRAIN), TRAIN, 0, "cpu", backends)
    (group,) = Population(*given).groups
    assert isinstance(group, Group)
    batch = next(generate(TASK, "train", "cpu")[1].batches(TRAIN.batch_size))
    with memory._Alive() as alive:
        state = (group.parameters, group.buffers)
        group.model.gradients(*state, *batch[:2], batch[2].flatten(), None, None)
    return alive.peak


@pytest.mark.parametrize("mixer", mixer_names())
def test_what_is_counted_without_values_is_what_a_step_takes(mixer: str) -> None:
    arch, copies = stack("base_conv", mixer), 0
    backends = resolve_backends(arch, "cpu", torch.float32)
    (group,) = Population(arch, 64, members_of(TRAIN), TRAIN, 0, backends=backends).groups
    buffers = memory._KEPT_COPIES + memory._UPDATE_COPIES
    copies = buffers * group.flat_MP.numel() * 4 + memory._resident_bytes(TASK)
    exact, quick, real = needed(arch, 4, True), needed(arch, 4), really_alive(arch)
    # Buffers that all members share are counted for each; a kernel's workspace is its own.
    assert real <= 1.01 * (exact - copies) <= 1.1 * real + 4 * 1024
    assert quick >= 0.99 * exact


def test_members_that_wait_are_counted_with_their_optimisers() -> None:
    arch = stack("attention")
    (group,) = Population(arch, 64, members_of(TRAIN), TRAIN, 0).groups
    group.begin(1)
    (optimiser, masters), more = (group.optimiser, group.flat_MP), TRAIN.seeds + 3
    held = 4 * sum(
        x.numel() for x in (masters, optimiser.grad_MP, optimiser.mean_MP, optimiser.square_MP)
    )
    backends = resolve_backends(arch, "cpu", torch.float32)
    waiting = TRAIN.model_copy(update={"seeds": more})
    given = (CPU, backends, 2, False)
    found = [population_bytes(arch, TASK, train, *given) for train in (TRAIN, waiting)]
    assert found[1] - found[0] == held // TRAIN.population * (waiting.population - TRAIN.population)


def test_examples_are_counted_as_they_lie() -> None:
    splits = ("train", "selection", "report")
    held = sum(
        part.numel() * part.itemsize
        for split in splits
        for examples in generate(TASK, split, "cpu")
        for part in (examples.tokens, examples.at, examples.labels)
    )
    assert memory._resident_bytes(TASK) == held


def test_as_many_as_fit_are_trained_together() -> None:
    arch = stack("base_conv", "linear_attention")
    backends = resolve_backends(arch, "cpu", torch.float32)
    for room, together in (
        (needed(arch, 4), 4),
        (needed(arch, 4) - 1, 3),
        (needed(arch, 2), 2),
        (needed(arch, 1), 1),
        (0, 1),
    ):
        assert members_together(arch, TASK, TRAIN, "cpu", backends, room) == together


def test_a_limit_of_the_container_counts(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    names = {"_MEMINFO": "MemTotal: 9 kB\nMemAvailable: 4000 kB\n", "_GROUP_LIMIT": "max\n"}
    names["_GROUP_USED"] = "1000000\n"
    for name, text in names.items():
        (folder / name).write_text(text)
        monkeypatch.setattr(memory, name, folder / name)
    assert available_bytes(CPU) == 2_048_000
    (folder / "_GROUP_LIMIT").write_text("2000000\n")
    assert available_bytes(CPU) == 500_000
    (folder / "_MEMINFO").unlink()
    assert available_bytes(CPU) > 2**60


def test_a_share_of_a_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 bytes, 900 are free and 20 are reserved and not used; a quarter is ours."""
    numbers = {"memory_allocated": 10, "memory_reserved": 30, "mem_get_info": (900, 1000)}
    for share, expected in ((1.0, 0.9 * 920), (0.25, 0.9 * 240)):
        for name, value in numbers.items():
            monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
        fractions = {None: share}  # torch refuses a device without an index here, and here alone
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fractions.__getitem__)
        assert available_bytes(torch.device("cuda")) == int(expected)


def request() -> TrialRequest:
    return TrialRequest(
        study="s",
        number=0,
        token="t",
        arch=stack("base_conv", "attention"),
        task=TASK,
        train=TRAIN,
        profile=ProfileSpec(prefill=((1, 12),), decode=((1, 12),), exclusive=False),
        seed=3,
        device="cpu",
        profile_wanted=False,
    )


def test_a_trial_says_how_it_was_split(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    arch = request().arch
    for room in (2**40, needed(arch, 2)):
        monkeypatch.setattr(memory, "available_bytes", lambda _device, room=room: room)
        (event,) = (one for one in run_trial(request()) if isinstance(one, Evaluated))
        found[event.evaluation.groups] = event.evaluation
    whole, parted = found[(4,)], found[(2, 2)]
    assert parted.recall == whole.recall
    for one, other in zip(parted.members, whole.members, strict=True):
        # fp32, 12 steps: roundings of 6e-8 that Adam's division may enlarge.
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)
