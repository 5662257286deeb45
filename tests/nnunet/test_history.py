from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread

from nnunet_cpr import SGDCPR, KappaWS
from nnunet_cpr.nnunet.history import COLUMNS, History

NAMES = ["layer.weight"]


def train(history: History, epochs: range, optimizer: SGDCPR, p: torch.nn.Parameter) -> None:
    for epoch in epochs:
        p.grad = -torch.ones_like(p)
        optimizer.step()
        history.append(epoch, optimizer.cpr)


@pytest.fixture
def run(tmp_path: Path) -> History:
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = SGDCPR([("layer.weight", p)], lr=0.001, kappa=KappaWS(2))
    history = History.resume(tmp_path, 0, NAMES)
    train(history, range(5), optimizer, p)
    return history


def test_the_file_says_what_was(run: History) -> None:
    table = pd.read_csv(run.folder / "cpr_history.csv")
    assert table.columns.tolist() == COLUMNS
    assert table["epoch"].tolist() == [0, 1, 2, 3, 4] and table["step"].tolist() == [1, 2, 3, 4, 5]
    assert table["parameter"].unique().tolist() == ["layer.weight"]
    assert np.isinf(table["kappa"][:2]).all() and np.isfinite(table["kappa"][2:]).all()
    assert (table["multiplier"][:3] == 0).all() and table["multiplier"].max() > 0
    # Nine digits give a float32 back exactly.
    assert table["measure"].astype(np.float32).tolist() == [m[0] for m in run.measure]


@pytest.mark.parametrize(
    "torn", [b"", b"5,6,layer.we", b"5,6,layer.weight,1.2", b"9", b"\x00\x00\x00", b"\xff", b'"x']
)
def test_resuming_keeps_the_epochs_before_and_drops_what_is_done_again(
    run: History, torn: bytes
) -> None:
    with open(run.folder / "cpr_history.csv", "ab") as file:
        file.write(torn)
    resumed = History.resume(run.folder, 3, NAMES)
    assert resumed.epochs == [0, 1, 2] and resumed.names == run.names
    for name in ("measure", "kappa", "multiplier"):
        np.testing.assert_array_equal(getattr(resumed, name), getattr(run, name)[:3])
    assert pd.read_csv(run.folder / "cpr_history.csv")["epoch"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("1,2,layer", "1,2,other"),
        lambda text: text.replace("1,2,layer", "1,x,layer"),
        lambda text: text.replace("\r\n1,2,layer", "\r\n1,2,layer.weight,1,2,3\r\n1,2,layer"),
    ],
)
def test_an_epoch_that_is_not_whole_is_left_out(run: History, damage) -> None:
    path = run.folder / "cpr_history.csv"
    path.write_bytes(damage(path.read_bytes().decode()).encode())
    resumed = History.resume(run.folder, 5, NAMES)
    assert resumed.epochs == [0, 2, 3, 4]
    resumed.draw()


def test_a_measure_that_is_not_a_number_is_kept(tmp_path: Path) -> None:
    history = History.resume(tmp_path, 0, NAMES)
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = SGDCPR([("layer.weight", p)], lr=0.1, kappa=KappaWS(1))
    train(history, range(3), optimizer, p)
    p.data.fill_(float("nan"))
    train(history, range(3, 5), optimizer, p)
    history.draw()
    resumed = History.resume(tmp_path, 5, NAMES)
    assert resumed.epochs == [0, 1, 2, 3, 4] and np.isnan(resumed.measure[4][0])
    resumed.draw()


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"a,b\n1,2\n", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_set_aside(run: History, content: bytes) -> None:
    (run.folder / "cpr_history.csv").write_bytes(content)
    resumed = History.resume(run.folder, 3, NAMES)
    assert resumed.epochs == [] and resumed.set_aside is not None
    assert resumed.set_aside.read_bytes() == content


def test_a_new_training_starts_a_new_file(run: History) -> None:
    assert History.resume(run.folder, 0, NAMES).epochs == []
    assert (run.folder / "cpr_history.csv").read_text().strip() == ",".join(COLUMNS)


def test_resuming_without_the_file_starts_one(tmp_path: Path) -> None:
    assert History.resume(tmp_path, 7, NAMES).epochs == []


def test_the_picture_appears_whole_and_alone(run: History) -> None:
    run.draw()
    picture = imread(run.folder / "cpr_progress.png")
    assert picture.shape[1] > 1000 and picture.std() > 0.05
    assert sorted(f.name for f in run.folder.iterdir()) == ["cpr_history.csv", "cpr_progress.png"]


def test_a_picture_can_be_drawn_before_any_bound_is_set(tmp_path: Path) -> None:
    history = History.resume(tmp_path, 0, NAMES)
    p = torch.nn.Parameter(torch.ones(2, 2))
    train(history, range(1), SGDCPR([("layer.weight", p)], lr=0.1), p)
    history.draw()
    assert (tmp_path / "cpr_progress.png").exists()


def test_a_picture_that_cannot_be_written_leaves_nothing_half_written(run: History, monkeypatch) -> None:
    run.draw()
    before = (run.folder / "cpr_progress.png").read_bytes()

    def full_disk(history: History, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nnunet_cpr.nnunet.history.draw_progress", full_disk)
    with pytest.raises(OSError, match="No space"):
        run.draw()
    assert (run.folder / "cpr_progress.png").read_bytes() == before
    assert len(list(run.folder.iterdir())) == 2
