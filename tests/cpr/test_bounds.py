from __future__ import annotations

import math

import pytest
import torch

from nnunet_cpr import KappaIP, KappaK, KappaWS
from nnunet_cpr.cpr.bounds import Bound
from tests.helpers.bounds import SHORT


def run(bound: Bound, *measures: list[float]) -> list[list[float]]:
    """Return the bounds after each step from the regularization values over the steps."""
    table = torch.tensor(measures).T
    kappa = torch.full((len(measures),), math.inf)
    memory = bound.memory(kappa)
    out = []
    for t, r in enumerate(table):
        bound.update_(kappa, torch.tensor(t), r, memory)
        out.append(kappa.tolist())
    return out


def test_kappa_ip_is_set_at_first_negative_second_difference() -> None:
    convex_then_concave = [0.0, 1.0, 3.0, 6.0, 8.0, 9.0]
    always_convex = [0.0, 1.0, 4.0, 9.0, 16.0, 25.0]
    after = run(KappaIP(1), convex_then_concave, always_convex)
    assert [k[0] for k in after] == [math.inf] * 4 + [8.0, 8.0]
    assert all(k[1] == math.inf for k in after)


def test_kappa_ip_skips_nonfinite_samples() -> None:
    after = run(KappaIP(1), [0.0, 1.0, math.nan, 3.0, 4.0])
    assert [k[0] for k in after][-2:] == [math.inf, 4.0]


@pytest.mark.parametrize("bound", SHORT)
def test_skipped_step_changes_nothing(bound: Bound) -> None:
    """R is NaN in a step that ``GradScaler`` skips."""
    kappa = torch.full((2,), math.inf)
    memory = bound.memory(kappa)
    for t in range(6):
        before = [x.clone() for x in (kappa, *memory.values())]
        bound.update_(kappa, torch.tensor(t), torch.full((2,), math.nan), memory)
        for x, y in zip(before, (kappa, *memory.values())):
            torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)
        bound.update_(kappa, torch.tensor(t), torch.tensor([float(t), math.sqrt(t)]), memory)
    assert kappa[1].isfinite()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KappaWS(0), "KappaWS.steps: expected a positive whole number, got 0"),
        (lambda: KappaK(math.nan), "KappaK.value: expected a positive finite number"),
        (lambda: KappaIP(10, ema=1.0), r"KappaIP.ema: expected a number in \[0, 1\)"),
    ],
)
def test_wrong_values_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
