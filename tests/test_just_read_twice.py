"""The just-read-twice objective: its labels, masks and loss by hand, and what it leaves alone."""

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import samples
import torch
from archsearch_kernels.dropout import struck
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from archsearch import just_read_twice as module
from archsearch.arch import ArchSpec, LayerSpec
from archsearch.bundle import load_bundle
from archsearch.cli import app
from archsearch.compose import count
from archsearch.cost import known_metrics, parameters
from archsearch.export import export_trial
from archsearch.feed import epoch_feeds
from archsearch.just_read_twice import just_read_twice
from archsearch.members import Member, initial_model
from archsearch.messages import Evaluated, Event, Failed, Profiled, ProfileSpec, TrialRequest
from archsearch.model import LanguageModel, resolve_backends
from archsearch.mqar import generate
from archsearch.population import Population
from archsearch.recipes import RECIPES
from archsearch.records import TrialState
from archsearch.spec import JustReadTwice, MqarSpec, Prompt, Segment, TrainSpec, model_vocab_size
from archsearch.store import Store
from archsearch.study_file import load_study
from archsearch.trial import run_trial

SEED, VOCAB, MASK = 5, 24, 24
FOUR = (Member(1e-2, 0), Member(1e-2, 1), Member(3e-3, 0), Member(3e-3, 1))
KEY = torch.tensor([77])
MASKING = JustReadTwice()
TINY = RECIPES["tiny"]


def task(prompt: Prompt = "twice") -> MqarSpec:
    return MqarSpec(
        recipe="custom",
        vocab_size=VOCAB,
        # Not multiples of the batch: each segment ends in a partial batch. 8 steps an epoch.
        train=(Segment(length=12, pairs=2, examples=27), Segment(length=16, pairs=3, examples=25)),
        test=(Segment(length=12, pairs=2, examples=20), Segment(length=16, pairs=3, examples=20)),
        prompt=prompt,
    )


def spec(objective: JustReadTwice | None = MASKING, **fields: Any) -> TrainSpec:
    given = {"learning_rates": (1e-2, 3e-3), "seeds": 2, "epochs": 4, "batch_size": 8}
    given |= {"test_batch_size": 7, "objective": objective, "schedule": "constant"}
    return TrainSpec.model_validate({**given, **fields})


def stack(*mixers: str, width: int = 16, **fields: Any) -> ArchSpec:
    """The fields are those of the last mixer."""
    given: list[dict[str, Any]] = [*({} for _ in mixers[1:]), fields]
    layers = (LayerSpec(mixer=name, fields=own) for name, own in zip(mixers, given, strict=True))
    return ArchSpec(width=width, layers=tuple(layers))


def population(
    arch: ArchSpec, train: TrainSpec, members: tuple[Member, ...] = FOUR, seed: int = SEED
) -> Population:
    backends = resolve_backends(arch, "cpu", torch.float32)
    vocab = model_vocab_size(task(), train)
    return Population(arch, vocab, members, train, seed, backends=backends, dtype=torch.float64)


def lowbias32(x: int) -> int:
    """Wellons' hash of 32 bits, on plain integers."""
    x &= 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def masked_places(seed: int, step: int, rows: int, prefix: int, share: float) -> list[list[bool]]:
    """The masks of one step, from the study's seed and the step alone."""
    digest = hashlib.sha256(repr(("mask", seed)).encode()).digest()
    start = int.from_bytes(digest[:8], "big") >> 1
    offset = lowbias32(lowbias32(start + step))
    flat = [lowbias32(i + offset) < share * 2**32 for i in range(rows * prefix)]
    return [flat[row * prefix : (row + 1) * prefix] for row in range(rows)]


def test_masks_labels_and_weights_of_a_small_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.tensor([[1, 20, 2, 21, 2, 0, 1, 0], [3, 22, 4, 23, 3, 0, 4, 9]])
    at, labels = torch.tensor([[6, 4], [4, 6]]), torch.tensor([[20, 21], [22, 23]])
    masked = torch.tensor([[True, False, False, True], [False, True, False, False]])
    monkeypatch.setattr(module, "struck", lambda x, share, key: masked)
    asked = just_read_twice(JustReadTwice(), tokens, at, labels, 4, MASK, KEY)
    assert asked.tokens.tolist() == [
        [MASK, 20, 2, MASK, 2, 0, 1, 0],
        [3, MASK, 4, 23, 3, 0, 4, 9],
    ]
    assert asked.at.tolist() == [[6, 4, 0, 1, 2, 3], [4, 6, 0, 1, 2, 3]]
    assert asked.labels.tolist() == [20, 21, 1, 20, 2, 21, 22, 23, 3, 22, 4, 23]
    assert asked.weights is not None
    # Four labels behind the prefix; three masked places.
    quarter, third = 1 / 4, 0.25 / 3
    wanted = [quarter, quarter, third, 0, 0, third, quarter, quarter, 0, third, 0, 0]
    assert asked.weights.tolist() == pytest.approx(wanted, rel=1e-15)


def test_labels_inside_a_given_prefix_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.tensor([[1, 20, 2, 21, 2, 0, 1, 0], [3, 22, 4, 23, 3, 0, 4, 9]])
    at, labels = torch.tensor([[6, 4], [4, 6]]), torch.tensor([[20, 21], [22, 23]])
    monkeypatch.setattr(module, "struck", lambda x, share, key: torch.zeros_like(x, dtype=bool))
    asked = just_read_twice(JustReadTwice(prefix=6), tokens, at, labels, 4, MASK, KEY)
    assert asked.weights is not None and asked.at.shape == (2, 8)
    # The labels at 6 are at or behind the prefix of 6, those at 4 are not; nothing is masked.
    assert asked.weights.tolist() == [0.5, *[0.0] * 8, 0.5, *[0.0] * 6]
    whole = just_read_twice(JustReadTwice(prefix=99), tokens, at, labels, 4, MASK, KEY)
    assert whole.at.shape == (2, 10) and whole.weights is not None
    assert whole.weights.tolist() == [0.0] * 20


def hand_written_loss(
    model: LanguageModel, objective: JustReadTwice, batch: tuple[Tensor, ...], at_step: int
) -> Tensor:
    """The two means, one place after the other."""
    tokens, at, labels = batch
    prefix = 4 * at.shape[1] if objective.prefix is None else objective.prefix
    masks = masked_places(SEED, at_step, len(tokens), prefix, objective.mask_share)
    shown = tokens.clone()
    for row, mask in enumerate(masks):
        for place in range(prefix):
            if mask[place]:
                shown[row, place] = MASK
    logits = model.logits(model(shown))
    behind = [
        F.cross_entropy(logits[row, place], label)
        for row in range(len(tokens))
        for place, label in zip(at[row], labels[row], strict=True)
        if place >= prefix
    ]
    filled = [
        F.cross_entropy(logits[row, place], tokens[row, place])
        for row, mask in enumerate(masks)
        for place in range(prefix)
        if mask[place]
    ]
    assert behind and filled
    return torch.stack(behind).mean() + objective.mask_weight * torch.stack(filled).mean()


@pytest.mark.parametrize(
    ("mixer", "fields", "objective"),
    [
        ("attention", {}, MASKING),
        ("attention", {}, JustReadTwice(mask_share=0.4, mask_weight=2.0, prefix=14)),
        # Reads the first 9 tokens as a whole, whatever the prefix of the objective is.
        ("prefix_linear", {"prefix_len": 9}, MASKING),
    ],
)
def test_members_equal_models_trained_alone_on_the_hand_written_loss(
    mixer: str, fields: dict[str, Any], objective: JustReadTwice
) -> None:
    arch, train = stack("base_conv", mixer, **fields), spec(objective, epochs=1)
    data = generate(task(), "train", "cpu")
    together = population(arch, train)
    (rung,) = together.train(data, generate(task(), "selection", "cpu"))
    for index, member in enumerate(FOUR):
        model = initial_model(arch, VOCAB + 1, train, SEED, member.seed).double()
        model.use_backends(resolve_backends(arch, "cpu", torch.float32))
        optimiser = torch.optim.AdamW(
            model.parameters(), member.learning_rate, train.betas, weight_decay=0.1
        )
        losses: list[float] = []
        for _ in range(train.epochs):
            for examples in data:
                for batch in examples.batches(train.batch_size):
                    loss = hand_written_loss(model, objective, batch, len(losses))
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    losses.append(loss.item())
        assert rung.step == len(losses) == 8
        assert rung.train_loss[index] == pytest.approx(sum(losses) / len(losses), abs=1e-9)
        for name, value in model.state_dict().items():
            # fp64, 8 steps: only the order of sums differs; see test_population.
            found = together.weights(index)[name]
            torch.testing.assert_close(found, value, rtol=0, atol=1e-9, msg=name)


def test_masks_are_those_of_the_seed_and_the_step_whoever_learns() -> None:
    (examples, *_) = generate(task(), "train", "cpu")

    def shown(seed: int, step: int, arch: ArchSpec, members: tuple[Member, ...]) -> Tensor:
        (feed, *_) = epoch_feeds((examples,), 8)
        taught = population(arch, spec(), members, seed)
        return taught.groups[0]._asked(feed, torch.tensor([step])).tokens

    first = shown(SEED, 3, stack("attention"), FOUR)
    assert torch.equal(first, shown(SEED, 3, stack("base_conv", width=8), FOUR[1:2]))
    assert not torch.equal(first, shown(SEED, 4, stack("attention"), FOUR))
    assert not torch.equal(first, shown(SEED + 1, 3, stack("attention"), FOUR))
    mask = torch.tensor(masked_places(SEED, 3, 8, 8, 0.15))
    assert torch.equal(first[:, :8] == MASK, mask)
    assert torch.equal(first.masked_fill(first == MASK, 0)[:, 8:], examples.tokens[:8, 8:].long())


def test_the_share_of_masked_tokens() -> None:
    keys = [torch.tensor([step]) for step in range(200)]
    masked = torch.stack([struck(torch.zeros(32, 64), 0.15, key) for key in keys])
    # 409600 draws: the standard deviation of the share is 0.00056, of that of a place (200 draws)
    # 0.025 and of that of a step (2048 draws) 0.008; the bounds are five of them.
    assert masked.double().mean().item() == pytest.approx(0.15, abs=0.0028)
    assert (masked.double().mean(0) - 0.15).abs().max() < 0.126
    assert (masked.double().mean((1, 2)) - 0.15).abs().max() < 0.04


def test_a_member_alone_has_the_numbers_it_has_in_company() -> None:
    data, selection = generate(task(), "train", "cpu"), generate(task(), "selection", "cpu")
    arch, train = stack("base_conv", "linear_attention"), spec(embed_dropout=0.1, epochs=1)
    company, alone = population(arch, train), population(arch, train, FOUR[2:3])
    (together,) = company.train(data, selection)
    (single,) = alone.train(data, selection)
    assert single.train_loss[0] == pytest.approx(together.train_loss[2], abs=1e-9)
    assert single.selection_recall[0] == together.selection_recall[2]


def test_evaluation_masks_nothing() -> None:
    data, selection = generate(task(), "train", "cpu"), generate(task(), "selection", "cpu")
    taught = population(stack("base_conv", "attention"), spec(epochs=1), FOUR[:1])
    list(taught.train(data, selection))
    model = LanguageModel(stack("base_conv", "attention"), VOCAB + 1).double()
    model.load_state_dict(taught.weights(0))
    for examples in selection:
        (batch,) = examples.batches(len(examples))
        best = model.logits(model(batch[0], batch[1])).argmax(-1)
        share = (best == batch[2]).double().mean().item()
        assert taught.recall(selection)[0][examples.name] == pytest.approx(share, abs=1e-12)


def request(arch: ArchSpec, **fields: Any) -> TrialRequest:
    profile = ProfileSpec(prefill=(), decode=((1, 16),), exclusive=False)
    given = {"study": "s", "number": 0, "token": "t", "arch": arch, "profile": profile}
    given |= {"seed": 0, "device": "cpu", **fields}
    return TrialRequest.model_validate(given)


def events_of(asked: TrialRequest) -> list[Event]:
    events = list(run_trial(asked))
    assert not isinstance(events[-1], Failed), events[-1]
    return events


def test_the_model_has_one_token_more_wherever_it_is_built_or_counted() -> None:
    arch = stack("base_conv", "attention")
    plain = request(arch, task=task(), train=spec(None, epochs=1))
    masking = request(arch, task=task(), train=spec(epochs=1))
    assert (plain.vocab_size, masking.vocab_size) == (VOCAB, VOCAB + 1)
    assert plain.profile_key != masking.profile_key
    events = events_of(masking)
    (evaluated,) = (event for event in events if isinstance(event, Evaluated))
    weights = load(evaluated.weights)
    assert weights["embedding.weight"].shape == (VOCAB + 1, 16)
    study = load_study(STUDY)
    assert study.vocab_size == study.task.vocab_size + 1
    known = known_metrics(arch, study)
    assert known["parameters"] == parameters(arch, study.vocab_size)
    assert parameters(arch, study.vocab_size) - parameters(arch, study.task.vocab_size) == 16
    assert isinstance(events[-1], Profiled)


def test_an_exported_model_has_the_token_too(tmp_path: Path) -> None:
    sample = samples.sample_study()
    masking = sample.spec.train.model_copy(update={"objective": MASKING})
    study = replace(sample, spec=sample.spec.model_copy(update={"train": masking}))
    folder, weights = tmp_path / "home", tmp_path / "w.safetensors"
    arch = stack("base_conv", "attention")
    trained = LanguageModel(arch, study.spec.vocab_size)
    weights.write_bytes(save(trained.state_dict()))
    trial = replace(
        samples.sample_trial(sample, 0, arch, TrialState.COMPLETE),
        weights_path=str(weights),
        weights_sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
    )
    store = SimpleNamespace(study=lambda name: study, trial=lambda name, number: trial)
    export_trial(cast(Store, store), study.name, 0, folder)
    loaded = load_bundle(folder)
    assert loaded.vocab_size == study.spec.task.vocab_size + 1
    assert torch.equal(loaded.embedding.weight, trained.embedding.weight)
    assert "last token: [MASK]" in (folder / "README.md").read_text()


def test_defaults_keep_the_keys_of_earlier_results() -> None:
    hashes = {
        name: [
            hashlib.sha256(part.canonical_json.encode()).hexdigest()[:16]
            for part in (recipe.task, recipe.train)
        ]
        for name, recipe in RECIPES.items()
    }
    # Taken before there were prompts and objectives.
    assert hashes == {
        "tiny": ["8bae51d62f2a1360", "157b4f023e30c82a"],
        "zoology-figure2": ["e89f4815d29ef46e", "62cc6c77ca2850d9"],
    }
    masking = TINY.train.model_copy(update={"objective": JustReadTwice()})
    assert masking.canonical_json != TINY.train.canonical_json
    assert TrainSpec.model_validate_json(masking.canonical_json) == masking
    assert TrainSpec.model_validate_json(TINY.train.canonical_json) == TINY.train


@pytest.mark.parametrize(
    ("mixer", "fields"), [("linear_attention", {}), ("prefix_linear", {"prefix_len": 16})]
)
def test_recall_is_learnt_from_masked_pairs_read_twice(mixer: str, fields: dict[str, Any]) -> None:
    train = TINY.train.model_copy(
        update={"objective": JustReadTwice(), "learning_rates": (2e-2,), "seeds": 1}
    )
    twice = TINY.task.model_copy(update={"prompt": "twice"})
    arch = stack("base_conv", mixer, width=32, **fields)
    (evaluated,) = (
        event
        for event in events_of(request(arch, task=twice, train=train))
        if isinstance(event, Evaluated)
    )
    # Guessing one of the values shown is right once in 4, 8 or 16 times: 0.15 on average.
    assert evaluated.evaluation.recall > 0.4


STUDY = Path(__file__).parent.parent / "studies" / "just_read_twice.yaml"


def test_the_study_is_previewed_and_names_prompt_and_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "--dry-run", str(STUDY)])
    assert result.exit_code == 0, result.output
    assert "mqar, recipe custom, prompt twice" in result.output
    assert "just_read_twice (0.15 masked, weight 0.25)" in result.output
    assert list(tmp_path.iterdir()) == []
    study = load_study(STUDY)
    assert study.search.trials == count(study.model)
