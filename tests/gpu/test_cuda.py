"""What only a CUDA device can show: captured training, captured decode, backends, a whole trial.

Run by hand on a machine that has one: `pytest -m gpu`.
"""

import pytest
import torch

from archsearch.arch import ArchSpec, LayerSpec
from archsearch.kernel_check import check_kernels
from archsearch.members import Member, members_of
from archsearch.memory import population_bytes
from archsearch.messages import Evaluated, Failed, Profiled, ProfileSpec, TrialRequest
from archsearch.model import resolve_backends
from archsearch.mqar import generate
from archsearch.population import Population
from archsearch.recipes import RECIPES
from archsearch.registry import mixer_names
from archsearch.spec import Execution, JustReadTwice, model_vocab_size
from archsearch.trial import run_trial

# Autograd's own thread may be the first of a process to multiply, and torch says so.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA"),
]

TINY = RECIPES["tiny"]
FEW_STEPS = TINY.train.model_copy(update={"epochs": 1, "rungs": 1})
PROFILE = ProfileSpec(prefill=((4, 64),), decode=((4, 64),), exclusive=True)


def two_layers(mixer: str, width: int = 64) -> ArchSpec:
    return ArchSpec(
        width=width,
        layers=(LayerSpec(mixer="base_conv", fields={}), LayerSpec(mixer=mixer, fields={})),
    )


def population(
    arch: ArchSpec, execution: Execution | None = None, together: int | None = None
) -> Population:
    backends = resolve_backends(arch, "cuda", torch.float32)
    given = (arch, TINY.task.vocab_size, members_of(FEW_STEPS), FEW_STEPS, 0, "cuda", backends)
    return Population(*given, execution=execution, together=together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_agrees_with_its_reference(dtype: torch.dtype) -> None:
    verdicts = check_kernels("cuda", dtypes=(dtype,))
    assert verdicts
    assert not [verdict for verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("mixer", mixer_names())
def test_captured_steps_equal_plain_steps(mixer: str) -> None:
    data = generate(TINY.task, "train", "cuda")
    selection = generate(TINY.task, "selection", "cuda")
    captured = population(two_layers(mixer), "captured")
    captured_rungs = list(captured.train(data, selection))
    plain_rungs = list(population(two_layers(mixer), "eager").train(data, selection))
    # The same kernels in the same order; only embedding gradients add up in an order of their own,
    # by atomics, so the two runs drift apart by roundings that 128 steps of Adam amplify.
    for one, other in zip(captured_rungs, plain_rungs, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=2e-2)
        assert one.selection_recall == pytest.approx(other.selection_recall, abs=5e-2)


@pytest.mark.parametrize("together", [1, 3])
def test_captured_groups_share_a_launcher_and_change_no_member(together: int) -> None:
    # Another number of members is another order of sums. Few steps, because one member's rate is
    # so high that its loss drifts by 7 % within an epoch.
    few = [segment.model_copy(update={"examples": 64}) for segment in TINY.task.train]
    data = generate(TINY.task.model_copy(update={"train": tuple(few)}), "train", "cuda")
    selection = generate(TINY.task, "selection", "cuda")
    arch = two_layers("attention")
    (whole,) = population(arch, "captured").train(data, selection)
    (parted,) = population(arch, "captured", together).train(data, selection)
    assert parted.train_loss == pytest.approx(whole.train_loss, rel=2e-2)


@pytest.mark.parametrize("mixer", ["attention", "linear_attention", "gated_delta"])
def test_a_training_step_needs_no_more_than_was_counted(mixer: str) -> None:
    arch, members = two_layers(mixer), members_of(FEW_STEPS)
    data, selection = generate(TINY.task, "train", "cuda"), generate(TINY.task, "selection", "cuda")
    backends = resolve_backends(arch, "cuda", torch.float32)
    given = (arch, TINY.task, FEW_STEPS, torch.device("cuda"), backends, len(members))
    counted = population_bytes(*given, exact=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    list(population(arch, "captured").train(data, selection))
    # Blocks are rounded up, and cuBLAS keeps a workspace of 32 MiB for each of two streams.
    assert torch.cuda.max_memory_allocated() - before < 1.05 * counted + 2**26


def test_captured_steps_mask_anew_as_plain_steps_do() -> None:
    task = TINY.task.model_copy(update={"prompt": "twice"})
    train = FEW_STEPS.model_copy(update={"objective": JustReadTwice(mask_weight=9.0), "rungs": 16})
    arch = two_layers("linear_attention", width=32)
    backends = resolve_backends(arch, "cuda", torch.float32)
    data, selection = generate(task, "train", "cuda"), generate(task, "selection", "cuda")

    def losses(execution: Execution) -> list[float]:
        still = (Member(0.0, 0),)  # nothing is learnt, so a loss shows the masks
        vocab = model_vocab_size(task, train)
        given = (arch, vocab, still, train, 0, "cuda", backends)
        taught = Population(*given, execution=execution)
        return [rung.train_loss[0] or 0.0 for rung in taught.train(data, selection)]

    # The same sums in the same order, but for atomics. Other masks moved a mean of 8 steps by 2e-3.
    assert losses("captured") == pytest.approx(losses("eager"), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_attention_learns_recall_in_every_precision(precision: str) -> None:
    train = TINY.train.model_copy(update={"precision": precision})
    events = list(run_trial(request(two_layers("attention", width=32), train)))
    assert not [event for event in events if isinstance(event, Failed)], events[-1]
    evaluated = next(event for event in events if isinstance(event, Evaluated))
    assert evaluated.evaluation.recall > 0.9


@pytest.mark.parametrize("mixer", mixer_names())
def test_trial_profiles_captured_decode_and_counts_the_declared_state(mixer: str) -> None:
    events = list(run_trial(request(two_layers(mixer), FEW_STEPS)))
    last = events[-1]
    assert isinstance(last, Profiled), last
    assert last.profile.decode[0].median_ms > 0
    assert "NVIDIA" in last.profile.device_model


def request(arch: ArchSpec, train: object) -> TrialRequest:
    return TrialRequest.model_validate(
        {
            "study": "gpu",
            "number": 0,
            "token": "t",
            "arch": arch,
            "task": TINY.task,
            "train": train,
            "profile": PROFILE,
            "seed": 0,
            "device": "cuda",
        }
    )
