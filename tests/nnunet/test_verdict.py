"""Verdicts on constructed histories and on short trainings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.history import History
from nnunet_cpr.nnunet.verdict import Kind, judge, unchanged
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
        # The learning rate ends at 0: the multipliers were positive before.
        (growing_r(), bounded(), ACTIVE * (np.arange(EPOCHS) < 15), Kind.HELD, "all 10 matrices active"),
        (growing_r(), bounded(INF), 0, Kind.UNSET, "all 10 matrices not regularized in 5,000 steps"),
        (growing_r(), bounded(20, 0), 0, Kind.TOO_LOOSE, "the bound is too loose, R at most 0.05 of it"),
        (3 * growing_r(), bounded(), ACTIVE, Kind.TOO_TIGHT, "for all 10 matrices, R up to 3"),
        # The multipliers overshot and are 0 at the end.
        (
            growing_r() * np.where(np.arange(EPOCHS) < FIRST, 1, 0.01),
            bounded(),
            ACTIVE * (np.arange(EPOCHS) < 15),
            Kind.TOO_TIGHT,
            "R of all 10 matrices pushed down to 0.01 of its bound",
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
    verdict = judge(history_of(measure, kappa, multiplier))
    assert verdict.kind is kind and text in verdict.text and "\n" not in verdict.text
    assert bool(verdict.advice) == (kind is not Kind.HELD)


@pytest.mark.parametrize(
    ("above", "kind"), [(0, Kind.HELD), (1, Kind.HELD), (2, Kind.TOO_TIGHT), (10, Kind.TOO_TIGHT)]
)
def test_a_tenth_of_the_matrices_does_not_decide(above: int, kind: Kind) -> None:
    factor = np.where(np.arange(MATRICES) < above, 1.5, 1.0)[:, None]
    verdict = judge(history_of(factor * growing_r(), bounded(), ACTIVE))
    assert verdict.kind is kind and ("1 not held" in verdict.text) == (above == 1)


@pytest.mark.parametrize(("active", "kind"), [(1, Kind.TOO_LOOSE), (2, Kind.HELD)])
def test_few_active_matrices_are_too_loose(active: int, kind: Kind) -> None:
    is_active = (np.arange(MATRICES) < active)[:, None]
    verdict = judge(history_of(0.9 * growing_r(), bounded(), ACTIVE * is_active))
    assert verdict.kind is kind and f"{MATRICES - active} " in verdict.text


def test_parameters_that_never_change_are_not_counted() -> None:
    """The bound of such a parameter, such as 10 times its R, says nothing."""
    measure, multiplier = growing_r(), np.tile(ACTIVE, (MATRICES, 1))
    measure[:4], multiplier[:4] = 0.1, 0
    history = history_of(measure, bounded(), multiplier)
    assert unchanged(history).tolist() == [True] * 4 + [False] * 6
    verdict = judge(history)
    assert verdict.kind is Kind.HELD and "all 6 matrices active" in verdict.text
    assert "(4 that never changed not counted)" in verdict.text and "never active" not in verdict.text


def test_one_epoch_does_not_tell_what_never_changes() -> None:
    history = history_of(np.ones((3, 1)), np.ones((3, 1)), np.full((3, 1), 1e-3))
    assert not unchanged(history).any() and judge(history).kind is Kind.HELD
    assert judge(history_of(np.ones((3, 1)), INF, 0)).kind is Kind.UNSET


def test_history_without_parameters_has_a_verdict() -> None:
    assert "no parameter matrix is regularized" in judge(history_of(*[np.ones((0, 3))] * 3)).text


def test_arbitrary_values_have_a_verdict() -> None:
    values = [0, 1, -1, 1e-45, 3e38, np.nan, np.inf, -np.inf]
    grid = np.array(np.meshgrid(values, values, values)).reshape(3, -1)
    with np.errstate(all="raise", under="ignore"):
        for epochs in (1, 2, 8):
            for triple in grid.T:
                judge(history_of(*(np.full((2, epochs), value) for value in triple)))
            judge(history_of(*(row.reshape(-1, epochs) for row in grid)))


@pytest.mark.slow  # 2 seconds each
@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("ws6_4epochs_4iters", "active and held: "),
        ("ki0x20_3epochs_4iters", "WARNING! never active: the bound is too loose, R at most 0.05"),
        ("ki0x0p1_mu1en3_3epochs_4iters", "WARNING! bound too tight: multipliers still growing for"),
        ("ki0x0p1_2epochs_8iters", "WARNING! bound too tight: R of "),
        (
            "2epochs_4iters",
            "WARNING! bound never set: all 19 matrices not regularized in 8 steps (1 that",
        ),
        ("ip1_1epochs_2iters", "WARNING! Kappa-IP did not work with SGD"),
    ],
)
def test_training_reports_its_verdict(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str, text: str
) -> None:
    name = f"nnUNetTrainerCPR_{suffix}_seed1"
    space = workspace.with_results_in(tmp_path)
    monkeypatch.setattr(NamedTrainer, "_draw", lambda trainer: None)
    trainer = space.build(name, monkeypatch)
    trainer.num_val_iterations_per_epoch, trainer.disable_checkpointing = 1, True
    trainer.run_training()
    assert text in space.logs(name)[0].read_text()
    # nnU-Net's lowest deep-supervision head has weight 0 in the loss.
    history = History.read(space.fold(name))
    without = [n for n, is_unchanged in zip(history.names, unchanged(history)) if is_unchanged]
    assert without == ([] if "1epochs" in name else ["decoder.seg_layers.0.weight"])


def test_seed_with_processes_is_reported(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = workspace.build("nnUNetTrainerSGD_seed5", monkeypatch)
    trainer.on_train_start()
    assert "reproducible" not in capsys.readouterr().err
    monkeypatch.setattr("nnunet_cpr.nnunet.base_trainer.get_allowed_n_proc_DA", lambda: 2)
    trainer.on_train_start()
    assert "_seed5 does not make this training reproducible" in capsys.readouterr().err
