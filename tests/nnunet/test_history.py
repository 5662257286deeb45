from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from nnunet_cpr import SGDCPR, KappaWS
from nnunet_cpr.nnunet.history import COLUMNS, History, has_bounds

NAMES = ["layer.weight"]
EPOCHS = 5


def train(history: History, epochs: range, value: float | None = None) -> None:
    """Append epochs of one step each, with the bound set in step 2."""
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = SGDCPR([(name, p) for name in history.names], lr=0.001, kappa=KappaWS(2))
    for epoch in epochs:
        if value is not None and epoch == epochs[-1]:
            p.data.fill_(value)
        p.grad = -torch.ones_like(p)
        optimizer.step()
        history.append(epoch, optimizer.cpr)


def assert_same_epochs(resumed: History, history: History, count: int) -> None:
    """Check that the first ``count`` epochs, and no others, are equal bit for bit."""
    assert resumed.names == history.names
    assert resumed.epochs == history.epochs[:count] and resumed.steps == history.steps[:count]
    for name in ("measure", "kappa", "multiplier"):
        np.testing.assert_array_equal(getattr(resumed, name), getattr(history, name)[:count])


@pytest.fixture
def run(tmp_path: Path) -> History:
    history = History.resume(tmp_path, 0, NAMES)
    train(history, range(EPOCHS))
    return history


def test_file_contains_all_values(run: History) -> None:
    path = run.folder / "cpr_history.csv"
    table = pd.read_csv(path)
    assert table.columns.tolist() == COLUMNS
    assert table["epoch"].tolist() == [0, 1, 2, 3, 4] and table["step"].tolist() == [1, 2, 3, 4, 5]
    assert table["parameter"].unique().tolist() == NAMES
    assert np.isinf(table["kappa"][:2]).all() and np.isfinite(table["kappa"][2:]).all()
    assert (table["multiplier"][:3] == 0).all() and table["multiplier"].max() > 0
    # Nine digits give a float32 back exactly.
    assert table["measure"].astype(np.float32).tolist() == [m[0] for m in run.measure]
    assert has_bounds(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]) + "\n")
    assert not has_bounds(path)


def test_resume_drops_epochs_that_are_trained_again(run: History) -> None:
    resumed = History.resume(run.folder, 3, NAMES)
    assert resumed.backup is None
    assert_same_epochs(resumed, run, 3)
    train(resumed, range(3, 4))
    assert pd.read_csv(run.folder / "cpr_history.csv")["epoch"].tolist() == [0, 1, 2, 3]


def test_epoch_of_which_a_kill_has_cut_off_rows_is_left_out(tmp_path: Path) -> None:
    path, history = tmp_path / "cpr_history.csv", History(tmp_path, ["first.weight", "last.weight"])
    for epoch, value in enumerate((np.inf, 1.0)):
        history.add(epoch, 250 * (epoch + 1), *np.full((3, 2), value, np.float32))
    whole = history._text.getvalue().encode()
    for cut in (b"1\r\n", b"1,500,last.weight,1,1,1\r\n"):
        path.write_bytes(whole.removesuffix(cut))
        assert_same_epochs(History.read(tmp_path), history, 1)
    assert has_bounds(path)


@pytest.mark.parametrize("epoch", [0, 7])
def test_history_starts_anew_without_a_file_or_an_epoch(tmp_path: Path, epoch: int) -> None:
    if epoch == 0:
        train(History.resume(tmp_path, 0, NAMES), range(2))  # an earlier training
    history = History.resume(tmp_path, epoch, NAMES)
    train(history, range(epoch, epoch + 1))
    assert history.backup is None
    assert pd.read_csv(tmp_path / "cpr_history.csv")["epoch"].tolist() == [epoch]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content.replace(b"1,2,layer", b"1,2,other"),
        lambda content: content.replace(b"layer", b"other"),
        lambda content: content.replace(b"1,2,layer", b"\r\n1"),
        lambda content: b"\xff\x00" * 99 + b"\n",
    ],
)
def test_file_that_cannot_be_continued_is_renamed(run: History, damage) -> None:
    path = run.folder / "cpr_history.csv"
    path.write_bytes(damaged := damage(path.read_bytes()))
    resumed = History.resume(run.folder, EPOCHS, NAMES)
    assert resumed.epochs == [] and resumed.backup == run.folder / "cpr_history.unreadable.csv"
    assert resumed.backup.read_bytes() == damaged
    train(resumed, range(EPOCHS, EPOCHS + 1))
    assert History.resume(run.folder, EPOCHS + 1, NAMES).epochs == [EPOCHS]


def test_rows_of_a_failed_write_are_written_later(run: History) -> None:
    """A full disk may take a part of a row."""
    path = run.folder / "cpr_history.csv"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for epoch in (EPOCHS, EPOCHS + 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                train(run, range(epoch, epoch + 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert_same_epochs(History.resume(run.folder, epoch, NAMES), run, EPOCHS)  # as after a kill
    train(run, range(EPOCHS + 2, EPOCHS + 3))
    resumed = History.resume(run.folder, EPOCHS + 3, NAMES)
    assert resumed.backup is None
    assert_same_epochs(resumed, run, EPOCHS + 3)
