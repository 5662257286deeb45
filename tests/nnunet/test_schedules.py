from __future__ import annotations

from typing import Any

import pytest
import torch

from nnunet_cpr.nnunet.parts.schedule import (
    ConstantLRScheduler,
    CooldownLRScheduler,
    IterationLRScheduler,
    WarmupPolyLRScheduler,
)


def rates(kind: type[IterationLRScheduler], *length: Any, first_epoch: int = 0) -> list[float]:
    """Return the rates of the iterations as a training of nnU-Net sets them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = kind(optimizer, 0.01, *length)
    found = []
    for epoch in range(first_epoch, length[1]):
        schedule.step(epoch)
        at_start = optimizer.param_groups[0]["lr"]
        for iteration in range(length[2]):
            schedule.step(epoch, iteration)
            found.append(optimizer.param_groups[0]["lr"])
            assert iteration or found[-1] == at_start
    return found


def test_warmup_is_followed_by_polynomial_decay() -> None:
    found = rates(WarmupPolyLRScheduler, 4, 7, 2)
    assert found[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert found[4] == 0.01
    assert found[9] == pytest.approx(0.01 * 0.5**0.9)
    assert found[13] == pytest.approx(0.01 * 0.1**0.9)


def test_constant_rate_follows_the_warmup_for_any_length() -> None:
    assert rates(ConstantLRScheduler, 2, 3, 2) == [0.005, *[0.01] * 5]
    assert rates(ConstantLRScheduler, 2, 6, 2)[:6] == rates(ConstantLRScheduler, 2, 3, 2)


def test_cooldown_falls_linearly_at_the_end() -> None:
    found = rates(CooldownLRScheduler, 2, 5, 2, 40)
    assert found == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.0075, 0.005, 0.0025])


@pytest.mark.parametrize(
    ("kind", "extra"),
    [(WarmupPolyLRScheduler, ()), (ConstantLRScheduler, ()), (CooldownLRScheduler, (50,))],
)
def test_schedule_resumes_at_any_epoch(kind: type[IterationLRScheduler], extra: tuple[int, ...]) -> None:
    whole = rates(kind, 5, 4, 3, *extra)
    assert rates(kind, 5, 4, 3, *extra, first_epoch=2) == whole[6:]
