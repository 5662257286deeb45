from __future__ import annotations

import pytest
import torch

from nnunet_cpr.nnunet.poly_lr import WarmupPolyLRScheduler, warmup_poly


def test_warmup_is_followed_by_polynomial_decay() -> None:
    lrs = [warmup_poly(i, lr=0.01, warmup=4, total=14) for i in range(14)]
    assert lrs[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert lrs[4] == 0.01
    assert lrs[9] == pytest.approx(0.01 * 0.5**0.9)
    assert lrs[13] == pytest.approx(0.01 * 0.1**0.9)


def test_scheduler_resumes_at_any_epoch() -> None:
    def run(first_epoch: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = WarmupPolyLRScheduler(optimizer, 0.01, warmup=5, epochs=4, iterations_per_epoch=3)
        lrs = []
        for epoch in range(first_epoch, 4):
            scheduler.step(epoch)
            assert optimizer.param_groups[0]["lr"] == warmup_poly(epoch * 3, 0.01, 5, 12)
            for _ in range(3):
                scheduler.step_iteration()
                lrs.append(optimizer.param_groups[0]["lr"])
        return lrs

    whole = run(0)
    assert whole == [warmup_poly(i, 0.01, 5, 12) for i in range(12)]
    assert run(2) == whole[6:]
