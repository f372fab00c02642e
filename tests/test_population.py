"""A population of M gives the numbers of M models trained alone, whoever the members are."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.errors import DivergedError
from archsearch.members import Member, initial_model, members_of
from archsearch.messages import Rung
from archsearch.model import LanguageModel, resolve_backends
from archsearch.mqar import Examples, generate
from archsearch.population import Population, group_sizes
from archsearch.registry import mixer_names
from archsearch.spec import MqarSpec, Segment, TrainSpec

SEED, WIDTH, VOCAB = 5, 16, 24
TASK = MqarSpec(
    recipe="custom",
    vocab_size=VOCAB,
    # Not multiples of the batch: each segment ends in a partial batch. 10 steps an epoch.
    train=(Segment(length=12, pairs=2, examples=33), Segment(length=16, pairs=3, examples=37)),
    test=(Segment(length=12, pairs=2, examples=20), Segment(length=16, pairs=3, examples=20)),
)
DATA, SELECTION = generate(TASK, "train", "cpu"), generate(TASK, "selection", "cpu")
FOUR = (Member(1e-2, 0), Member(1e-2, 1), Member(3e-3, 0), Member(3e-3, 1))


def spec(**fields: Any) -> TrainSpec:
    given = {"learning_rates": (1e-2, 3e-3), "seeds": 2, "epochs": 5, "batch_size": 8}
    return TrainSpec.model_validate({**given, "test_batch_size": 7, **fields})


def stack(*mixers: str, ratio: float = 0.0) -> ArchSpec:
    return ArchSpec(
        width=WIDTH,
        layers=tuple(LayerSpec(mixer=mixer, fields={}) for mixer in mixers),
        channel_mixer=ChannelSpec(kind="swiglu", ratio=ratio) if ratio else ChannelSpec(),
    )


def trained(
    arch: ArchSpec,
    train: TrainSpec,
    members: tuple[Member, ...] = FOUR,
    dtype: torch.dtype = torch.float64,
) -> tuple[Population, list[Rung]]:
    population = new_population(arch, train, members, dtype)
    return population, list(population.train(DATA, SELECTION))


def new_population(
    arch: ArchSpec,
    train: TrainSpec,
    members: tuple[Member, ...],
    dtype: torch.dtype = torch.float32,
    together: int | None = None,
) -> Population:
    backends = resolve_backends(arch, "cpu", torch.float32)
    given = (arch, VOCAB, members, train, SEED, "cpu", backends, dtype)
    return Population(*given, together=together)


def masters(population: Population) -> Tensor:
    """Parameters of all members that are still in training."""
    return torch.cat([group.flat_MP for group in population.groups])


def trained_alone(arch: ArchSpec, train: TrainSpec, member: Member) -> LanguageModel:
    """The textbook loop: one model, torch's optimiser, scheduler, clipping and loss."""
    model = initial_model(arch, VOCAB, train, SEED, member.seed).double()
    model.use_backends(resolve_backends(arch, "cpu", torch.float32))
    optimiser = torch.optim.AdamW(
        model.parameters(), member.learning_rate, train.betas, weight_decay=train.weight_decay
    )
    scheduler = CosineAnnealingLR(optimiser, T_max=train.epochs)
    for _ in range(train.epochs):
        for examples in DATA:
            for start in range(0, len(examples), train.batch_size):
                rows = slice(start, start + train.batch_size)
                tokens, at = examples.tokens[rows].long(), examples.at[rows].long()
                every = model.logits(model(tokens))  # at all positions, then picked
                picked = torch.stack([row[places] for row, places in zip(every, at, strict=True)])
                loss = F.cross_entropy(picked.flatten(0, 1), examples.labels[rows].long().flatten())
                optimiser.zero_grad()
                loss.backward()
                if train.grad_clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
                optimiser.step()
        scheduler.step()
    return model


def plain_recall(model: LanguageModel, data: tuple[Examples, ...]) -> dict[str, float]:
    found = {}
    for examples in data:
        logits = model.logits(model(examples.tokens.long()))
        hits = [
            int(row[place].argmax()) == int(label)
            for row, places, labels in zip(logits, examples.at, examples.labels, strict=True)
            for place, label in zip(places, labels, strict=True)
        ]
        found[examples.name] = sum(hits) / len(hits)
    return found


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        # fp64, 50 steps: only the order of sums differs, about 1e-15 a step, and Adam's division
        # by small second moments enlarges it by a few powers of ten.
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("mixer", mixer_names())
def test_members_equal_models_trained_alone(mixer: str) -> None:
    arch, train = stack("base_conv", mixer), spec()
    population, rungs = trained(arch, train)
    assert rungs[-1].step == 50
    for index, member in enumerate(FOUR):
        alone = trained_alone(arch, train, member)
        assert_same(population.weights(index), alone.state_dict())
        recall = plain_recall(alone, SELECTION)
        assert population.recall(SELECTION)[index] == pytest.approx(recall, abs=1e-12)
        assert rungs[-1].selection_recall[index] == pytest.approx(sum(recall.values()) / 2)


def test_clipping_and_channel_mixers_are_each_member_s_own() -> None:
    arch, train = stack("attention", ratio=2.0), spec(grad_clip=0.05)
    population, _ = trained(arch, train)
    for index, member in enumerate(FOUR):
        assert_same(population.weights(index), trained_alone(arch, train, member).state_dict())


def test_composition_and_order_change_no_member() -> None:
    arch, train = stack("base_conv", "attention"), spec(embed_dropout=0.2)
    whole, rungs = trained(arch, train)
    backwards, _ = trained(arch, train, FOUR[::-1])
    alone, alone_rungs = trained(arch, train, FOUR[2:3])
    assert_same(backwards.weights(1), whole.weights(2))
    assert_same(alone.weights(0), whole.weights(2))
    assert alone_rungs[-1].train_loss[0] == pytest.approx(rungs[-1].train_loss[2], abs=1e-9)


def test_one_seed_starts_and_drops_alike_at_every_learning_rate() -> None:
    still = (Member(0.0, 3), Member(0.0, 3), Member(0.0, 4))
    arch = stack("attention")
    population, rungs = trained(arch, spec(embed_dropout=0.5, epochs=1), still)
    first, second, other = rungs[-1].train_loss
    assert first == second != other  # nothing is learnt, so a loss shows start and masks
    start = initial_model(arch, VOCAB, spec(), SEED, 3).double().state_dict()
    assert_same(population.weights(0), start)


def test_dropout_is_for_training_only() -> None:
    arch = stack("base_conv", "attention")
    population, _ = trained(arch, spec(embed_dropout=0.5), FOUR[:1])
    model = LanguageModel(arch, VOCAB).double()
    model.load_state_dict(population.weights(0))
    assert population.recall(DATA)[0] == pytest.approx(plain_recall(model, DATA))


def test_the_same_seed_gives_the_same_bits() -> None:
    arch, train = stack("base_conv", "linear_attention"), spec(embed_dropout=0.1, epochs=3)
    first, first_rungs = trained(arch, train, dtype=torch.float32)
    torch.manual_seed(99)
    second, second_rungs = trained(arch, train, dtype=torch.float32)
    assert torch.equal(masters(first), masters(second))
    assert without_times(first_rungs) == without_times(second_rungs)


def test_a_diverged_member_is_counted_and_disturbs_no_bit_of_the_others() -> None:
    arch, train = stack("base_conv", "attention"), spec(epochs=2)
    calm = (Member(1e-2, 0), Member(1e-3, 1), Member(3e-3, 0))
    wild = (calm[0], Member(1e6, 1), calm[2])
    quiet, quiet_rungs = trained(arch, train, calm, torch.float32)
    loud, rungs = trained(arch, train, wild, torch.float32)
    assert rungs[-1].train_loss[1] is None
    assert rungs[-1].selection_recall[1] == 0.0
    assert masters(loud)[1].isfinite().all()  # it stopped where its loss was last finite
    for index in (0, 2):
        assert rungs[-1].train_loss[index] == quiet_rungs[-1].train_loss[index]
        for name, value in quiet.weights(index).items():
            assert torch.equal(loud.weights(index)[name], value), name


@pytest.mark.parametrize("together", [3, 2])
def test_a_diverged_member_leaves_at_a_rung_and_the_others_go_on_as_they_would(
    together: int,
) -> None:
    arch, train = stack("base_conv", "attention"), spec(epochs=3, rungs=3, embed_dropout=0.1)
    calm = (Member(1e-2, 0), Member(1e-3, 1), Member(3e-3, 0))
    quiet, quiet_rungs = trained(arch, train, calm)
    wild = (calm[0], Member(1e300, 1), calm[2])
    loud = new_population(arch, train, wild, torch.float64, together)
    rungs = list(loud.train(DATA, SELECTION))
    assert [group.indices for group in loud.groups] == [(0, 2)]
    assert [rung.train_loss[1] for rung in rungs] == [None] * 3
    assert [rung.selection_recall[1] for rung in rungs] == [0.0] * 3
    assert set(loud.recall(SELECTION)[1].values()) == {0.0}
    for index in (0, 2):
        # In a smaller group sums may be taken in another order, and no more; see `assert_same`.
        assert_same(loud.weights(index), quiet.weights(index))
        assert rungs[-1].train_loss[index] == pytest.approx(quiet_rungs[-1].train_loss[index])


def test_what_is_captured_is_not_thrown_away_for_one_member() -> None:
    """Captured work serves one size of group: members leave when at most half are left."""
    arch, train, found = stack("base_conv"), spec(epochs=2, rungs=2), []
    for wild in (1, 2):
        members = (*FOUR[wild:], *(Member(1e300, seed) for seed in range(wild)))
        population = Population(
            arch, VOCAB, members, train, SEED, dtype=torch.float64, execution="captured"
        )
        rungs = list(population.train(DATA, SELECTION))
        assert sum(loss is None for loss in rungs[-1].train_loss) == wild
        found.append([len(group.members) for group in population.groups])
    assert found == [[4], [2]]


@pytest.mark.parametrize("together", [1, 2, 3])
def test_members_in_groups_are_what_they_are_together(together: int) -> None:
    arch, train = stack("base_conv", "linear_attention"), spec(rungs=4, embed_dropout=0.1)

    def draw(epoch: int) -> tuple[Examples, ...]:
        return generate(TASK, "train", "cpu", epoch)

    whole = new_population(arch, train, FOUR, torch.float64)
    parted = new_population(arch, train, FOUR, torch.float64, together)
    assert len(parted.groups) == -(-4 // together)
    rungs = list(whole.train(draw(0), SELECTION, None, draw))
    for rung, other in zip(parted.train(draw(0), SELECTION, None, draw), rungs, strict=True):
        assert rung.step == other.step
        assert rung.selection_recall == other.selection_recall
        assert rung.train_loss == pytest.approx(other.train_loss, abs=1e-9)
    for index in range(4):
        assert_same(parted.weights(index), whole.weights(index))


def test_groups_are_few_and_equal_where_that_costs_little() -> None:
    assert group_sizes(16, 16) == group_sizes(16, 20) == (16,)
    assert group_sizes(16, 15) == (8, 8)
    assert group_sizes(16, 7) == (4, 4, 4, 4)
    assert group_sizes(7, 4) == (4, 3)
    assert group_sizes(3, 1) == (1, 1, 1)
    assert group_sizes(7, 2) == (2, 2, 2, 1)


def test_a_stopped_member_recalls_nothing() -> None:
    population, _ = trained(stack("base_conv", "attention"), spec())
    before = population.recall(DATA)
    assert min(min(by_segment.values()) for by_segment in before) > 0
    population.groups[0].alive_M[2] = False
    after = population.recall(DATA)
    assert set(after[2].values()) == {0.0}
    assert [after[0], after[1], after[3]] == [before[0], before[1], before[3]]


def test_a_population_of_diverged_members_ends() -> None:
    with pytest.raises(DivergedError, match="all 2 members"):
        trained(stack("attention"), spec(), (Member(1e9, 0), Member(1e8, 1)), torch.float32)


def test_rungs_are_evenly_spaced_and_the_last_is_the_end() -> None:
    _, rungs = trained(stack("base_conv"), spec(rungs=4), FOUR[:1])
    assert [rung.step for rung in rungs] == [12, 25, 38, 50]
    assert [rung.epoch for rung in rungs] == [1.2, 2.5, 3.8, 5.0]
    assert [rung.rung for rung in rungs] == [0, 1, 2, 3]


def test_a_rung_reports_the_loss_since_the_one_before() -> None:
    still = (Member(0.0, 0),)
    train = spec(epochs=2, rungs=2)
    _, rungs = trained(stack("attention"), train, still)
    model = initial_model(stack("attention"), VOCAB, train, SEED, 0).double()
    losses = [
        F.cross_entropy(model.logits(model(tokens, at)).flatten(0, 1), labels.flatten()).item()
        for examples in DATA
        for tokens, at, labels in examples.batches(train.batch_size)
    ]
    for rung in rungs:
        assert rung.train_loss[0] == pytest.approx(sum(losses) / len(losses), abs=1e-12)


def test_half_precision_trains_fp32_masters() -> None:
    arch = stack("base_conv", "attention")
    single, single_rungs = trained(arch, spec(), dtype=torch.float32)
    half, half_rungs = trained(arch, spec(precision="bf16"), dtype=torch.float32)
    assert masters(half).dtype is torch.float32
    assert half.weights(0)["embedding.weight"].dtype is torch.float32
    # A rounding of 2^-9 per activation moves a loss of about 3 by less than a hundredth.
    assert half_rungs[-1].train_loss == pytest.approx(single_rungs[-1].train_loss, abs=0.03)
    assert not torch.equal(masters(half), masters(single))


def test_members_are_every_rate_with_every_seed() -> None:
    train = spec(learning_rates=(0.1, 0.2), seeds=2)
    assert members_of(train) == (Member(0.1, 0), Member(0.1, 1), Member(0.2, 0), Member(0.2, 1))


def without_times(rungs: list[Rung]) -> list[Rung]:
    return [rung.model_copy(update={"seconds": 0.0}) for rung in rungs]


@pytest.mark.parametrize(("stop", "together"), [(1, 4), (2, 4), (3, 4), (2, 2), (3, 1)])
def test_a_population_goes_on_from_a_rung_bit_for_bit(stop: int, together: int) -> None:
    # Four rungs of 12 or 13 steps of an epoch of 10: in the middle of an epoch, and of a segment.
    train = spec(rungs=4, embed_dropout=0.1, grad_clip=1.0)
    arch = stack("base_conv", "gated_delta")
    whole, stopped, fresh = (
        new_population(arch, train, FOUR, torch.float32, together) for _ in range(3)
    )
    for population in (whole, stopped):
        population.groups[0].alive_M[-1] = False
    rungs = list(whole.train(DATA, SELECTION))
    running = stopped.train(DATA, SELECTION)
    for _ in range(stop):
        next(running)
    again = list(fresh.train(DATA, SELECTION, stopped.progress))
    assert without_times(again) == without_times(rungs)
    assert [rung.seconds for rung in again] == sorted(rung.seconds for rung in again)
    for name, value in whole.progress.tensors.items():
        assert torch.equal(fresh.progress.tensors[name], value), name


def test_fresh_examples_take_the_place_of_the_old_and_going_on_finds_them() -> None:
    train, arch = spec(rungs=4), stack("base_conv", "attention")

    def draw(epoch: int) -> tuple[Examples, ...]:
        return generate(TASK, "train", "cpu", epoch)

    fixed, _ = trained(arch, train, dtype=torch.float32)
    whole = new_population(arch, train, FOUR)
    rungs = list(whole.train(draw(0), SELECTION, None, draw))
    assert not torch.equal(masters(whole), masters(fixed))
    stopped = new_population(arch, train, FOUR)
    running = stopped.train(draw(0), SELECTION, None, draw)
    next(running), next(running)  # in the middle of the third epoch
    fresh = new_population(arch, train, FOUR)
    again = list(fresh.train(draw(0), SELECTION, stopped.progress, draw))
    assert without_times(again) == without_times(rungs)
    assert torch.equal(masters(fresh), masters(whole))


def test_every_epoch_sees_the_examples_drawn_for_it() -> None:
    train, seen = spec(epochs=3), []

    def draw(epoch: int) -> tuple[Examples, ...]:
        seen.append(epoch)
        return generate(TASK, "train", "cpu", epoch)

    data = draw(0)
    first = data[0].tokens.clone()
    list(new_population(stack("base_conv"), train, FOUR[:1]).train(data, SELECTION, None, draw))
    assert seen == [0, 1, 2]
    assert torch.equal(data[0].tokens, generate(TASK, "train", "cpu", 2)[0].tokens)
    assert not torch.equal(data[0].tokens, first)
