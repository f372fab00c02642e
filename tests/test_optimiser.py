"""The flat AdamW against torch's, its schedules against torch's, and stopped members."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from archsearch.optimiser import FlatAdamW, rate_factor
from archsearch.spec import TrainSpec

PARAMETERS, EPOCHS, PER_EPOCH = 17, 5, 4
RATES = (1e-2, 3e-3)


def spec(**fields: Any) -> TrainSpec:
    given = {"learning_rates": RATES, "seeds": 1, "batch_size": 1, "test_batch_size": 1}
    return TrainSpec.model_validate({**given, "epochs": EPOCHS, **fields})


def start() -> Tensor:
    return torch.randn(2, PARAMETERS, generator=torch.Generator().manual_seed(0)).double()


def slope(flat: Tensor, step: int) -> Tensor:
    """Gradient of a made-up loss, large enough that clipping bites."""
    return torch.sin(flat * (step + 1)) * 3 + flat


def flat_run(train: TrainSpec) -> Tensor:
    flat = start()
    optimiser = FlatAdamW(flat, RATES, train, PER_EPOCH)
    for step in range(EPOCHS * PER_EPOCH):
        optimiser.grad_MP.copy_(slope(flat, step))
        optimiser.update(torch.ones(2, dtype=torch.bool))
    return flat


def torch_run(train: TrainSpec) -> Tensor:
    """The same by torch.optim, one member at a time."""
    rows = []
    for rate, row in zip(RATES, start(), strict=True):
        parameter = row.clone().requires_grad_()
        plain = torch.optim.AdamW(
            [parameter], lr=rate, betas=train.betas, weight_decay=train.weight_decay
        )
        steps = EPOCHS if train.schedule == "cosine_per_epoch" else EPOCHS * PER_EPOCH
        scheduler = CosineAnnealingLR(plain, T_max=steps)
        for step in range(EPOCHS * PER_EPOCH):
            parameter.grad = slope(parameter.detach(), step)
            if train.grad_clip is not None:
                torch.nn.utils.clip_grad_norm_([parameter], train.grad_clip)
            plain.step()
            ends_epoch = step % PER_EPOCH == PER_EPOCH - 1
            if train.schedule == "cosine_per_step" or (
                train.schedule == "cosine_per_epoch" and ends_epoch
            ):
                scheduler.step()
        rows.append(parameter.detach())
    return torch.stack(rows)


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "constant"},
        {"schedule": "cosine_per_epoch"},
        {"schedule": "cosine_per_step", "betas": (0.8, 0.95), "weight_decay": 0.0},
        {"schedule": "cosine_per_step", "grad_clip": 1.0},
    ],
)
def test_updates_are_those_of_torch(fields: dict[str, Any]) -> None:
    train = spec(**fields)
    # fp64: the two differ by the order of a few products.
    torch.testing.assert_close(flat_run(train), torch_run(train), rtol=1e-12, atol=1e-12)


def test_warm_up_rises_to_the_schedule() -> None:
    train = spec(schedule="constant", warmup_steps=4)
    factors = [rate_factor(train, step, PER_EPOCH) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_ends_one_step_before_zero() -> None:
    train = spec(schedule="cosine_per_step")
    total = EPOCHS * PER_EPOCH
    last = rate_factor(train, total - 1, PER_EPOCH)
    assert last == pytest.approx((1 + math.cos(math.pi * (total - 1) / total)) / 2)
    assert 0 < last < 0.01


def test_a_stopped_member_stays_and_the_other_does_not_notice() -> None:
    train = spec(weight_decay=0.1)
    alone, both = start(), start()
    first, second = (FlatAdamW(flat, RATES, train, PER_EPOCH) for flat in (alone, both))
    for step in range(6):
        first.grad_MP.copy_(slope(alone, step))
        first.update(torch.tensor([True, True]))
        second.grad_MP.copy_(slope(both, step))
        if step >= 3:
            second.grad_MP[1] = float("nan")
        second.update(torch.tensor([True, step < 3]))
        if step == 2:
            stopped = both[1].clone()
    assert torch.equal(both[0], alone[0])
    assert torch.equal(both[1], stopped)
