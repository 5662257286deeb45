"""Verdicts on constructed histories and on short trainings."""

from __future__ import annotations

import numpy as np
import pytest

from nnunet_cpr.cpr.bounds import as_bound
from nnunet_cpr.nnunet.bounds_verdict import Kind, judge_bounds, unchanged
from tests.helpers.histories import history_of
from tests.helpers.workspace import Workspace

EPOCHS = 20
FIRST = 4  # epoch in which the bound is set
MATRICES = 10
INF = np.inf


def bounded(kappa: float = 1.0, first: int = FIRST) -> np.ndarray:
    """Return bounds ``[MATRICES, EPOCHS]`` that are set in an epoch."""
    return np.where(np.arange(EPOCHS) < first, INF, kappa) * np.ones((MATRICES, 1))


def growing_r() -> np.ndarray:
    """Return R that doubles before the bound is set and then stays near 1."""
    noise = np.random.default_rng(0).normal(0, 0.004, (MATRICES, EPOCHS))
    return np.minimum(0.5 + 0.5 * np.arange(EPOCHS) / FIRST, 1) * (1 + noise)


ACTIVE = np.where(np.arange(EPOCHS) < FIRST, 0, 1e-4)


@pytest.mark.parametrize(
    ("measure", "kappa", "multiplier", "kind", "text"),
    [
        (growing_r(), bounded(), ACTIVE, Kind.HELD, "active and held: all 10 matrices active"),
        (growing_r(), bounded(INF), 0, Kind.UNSET, "all 10 matrices not regularized in 5,000 steps"),
        (growing_r(), bounded(20, 0), 0, Kind.TOO_LOOSE, "too loose: none of 10 matrices active"),
        (3 * growing_r(), bounded(), ACTIVE, Kind.TOO_TIGHT, "all 10 matrices not held, R / bound 2.9"),
        # The multipliers overshot and are 0 at the end.
        (
            growing_r() * np.where(np.arange(EPOCHS) < FIRST, 1, 0.01),
            bounded(),
            ACTIVE * (np.arange(EPOCHS) < 15),
            Kind.TOO_TIGHT,
            "all 10 matrices not held, R / bound 0.0",
        ),
        (
            np.where(np.arange(EPOCHS) < 19, growing_r(), np.nan),
            bounded(),
            ACTIVE,
            Kind.DIVERGED,
            "R is not finite for all 10 matrices",
        ),
    ],
)  # fmt: skip
def test_verdict_names_the_state_of_the_bounds(
    measure, kappa, multiplier, kind: Kind, text: str
) -> None:
    verdict = judge_bounds(history_of(measure, kappa, multiplier))
    assert verdict.kind is kind and text in verdict.text and "\n" not in verdict.text
    assert bool(verdict.advice) == (kind is not Kind.HELD)


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 24, 120, 250, 5000, 250_000])
def test_advice_on_bounds_that_are_never_set_is_set_in_this_training(steps: int) -> None:
    history = history_of(np.ones((3, 1)), INF, 0)
    history.steps[-1] = steps
    advice = judge_bounds(history).advice
    _, _, word = advice.partition("such as _")
    assert advice.startswith("train longer") and bool(word) == (steps > 1)
    assert steps == 1 or 0 < as_bound(word).earliest < steps


@pytest.mark.parametrize(
    ("factor", "active", "kind"),
    [
        *((1.5, (1, MATRICES), Kind.HELD), (1.5, (2, MATRICES), Kind.TOO_TIGHT)),
        *((0.9, (MATRICES, 1), Kind.TOO_LOOSE), (0.9, (MATRICES, 2), Kind.HELD)),
    ],
)
def test_a_tenth_of_the_matrices_does_not_decide(
    factor: float, active: tuple[int, int], kind: Kind
) -> None:
    """So many matrices have R times a factor, and so many a multiplier."""
    changed, has_multiplier = (np.arange(MATRICES)[:, None] < count for count in active)
    measure = np.where(changed, factor, 1.0) * growing_r()
    assert judge_bounds(history_of(measure, bounded(), ACTIVE * has_multiplier)).kind is kind


def test_arbitrary_values_have_a_verdict() -> None:
    """It is given at the end of a training, which it must not end with an error."""
    values = [0, 1, -1, 1e-45, 3e38, np.nan, np.inf, -np.inf]
    grid = np.array(np.meshgrid(values, values, values)).reshape(3, -1)
    with np.errstate(all="raise", under="ignore"):
        for epochs in (1, 2, 8):
            for triple in grid.T:
                judge_bounds(history_of(*(np.full((2, epochs), value) for value in triple)))
            judge_bounds(history_of(*(row.reshape(-1, epochs) for row in grid)))
    assert "no parameter matrix is regularized" in judge_bounds(history_of(*[np.ones((0, 3))] * 3)).text


def test_parameters_that_never_change_are_not_counted() -> None:
    """The bound of such a parameter, such as 10 times its R, says nothing."""
    measure, multiplier = growing_r(), np.tile(ACTIVE, (MATRICES, 1))
    measure[:4], multiplier[:4] = 0.1, 0
    history = history_of(measure, bounded(), multiplier)
    assert unchanged(history).tolist() == [True] * 4 + [False] * 6
    verdict = judge_bounds(history)
    assert verdict.kind is Kind.HELD and "all 6 matrices active" in verdict.text
    assert "(4 that never changed not counted)" in verdict.text and "never active" not in verdict.text


def test_bounds_that_are_never_set_are_reported_at_the_start(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.build("nnUNetTrainerCPR_ws1000_1epochs_2iters", monkeypatch).on_train_start()
    said = "the bounds are set at step 1000 or later, but this training has 2 steps: nothing will be"
    shown = capsys.readouterr().err
    assert said in shown and "set in these steps, such as _ws1" in shown


def test_multiplier_that_the_figure_does_not_show_is_not_active() -> None:
    """4e-8, of rounding at the bound, was counted as active and drawn white."""
    held = np.ones((MATRICES, EPOCHS))
    for multiplier, kind in ((4e-8, Kind.TOO_LOOSE), (2e-6, Kind.HELD)):
        history = history_of(held, bounded(), np.full_like(held, multiplier))
        assert judge_bounds(history).kind is kind
