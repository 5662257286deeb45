"""Reuse of the sums of squares of a step in the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnunet_cpr import SGDCPR, AdamCPR, KappaKI0
from tests.fused.stepping import (
    parameters,
    set_gradients,
    use,
)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
@pytest.mark.parametrize("shape", [(4, 4), (60, 50), (40, 300)])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.detach().mul_(2),
        lambda p: p.data.mul_(2),  # raises no version
        lambda p: setattr(p, "data", p.data * 2),
        None,
    ],
    ids=["in place", "data in place", "new memory", "none"],
)
def test_changed_parameter_gets_new_sums(
    change: Callable[[torch.nn.Parameter], Any] | None,
    shape: tuple[int, int],
    build: type,
) -> None:
    p, q = parameters(shapes=[shape, (5, 4)])
    optimizer = build([p, q], lr=0.0, kappa=KappaKI0(1.0))
    use(optimizer, "cpu")
    for t in range(3):
        set_gradients([p, q], t + 10)
        optimizer.step()
        if t == 1 and change is not None:
            change(p)
    measure = p.detach().double().square().mean().item()
    assert optimizer._backend.reused_measures == (2 if change is None else 1)
    bound = optimizer.cpr.kappa[0].item()
    assert optimizer.cpr.lagrange_multiplier[0].item() > 0.02 * bound or change is None
    assert optimizer.cpr.measure[0].item() == pytest.approx(measure, rel=1e-6)
