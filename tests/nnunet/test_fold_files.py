"""Epochs in nnU-Net's training logs."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from nnunet_cpr.nnunet.fold_files import read_logs, read_progress, seconds_per_case

STAMP = "2026-01-02 03:04:05.678901: "
NAME = "training_log_2026_1_2_03_04_05.txt"


def epoch(number: int) -> list[str]:
    """Return the lines of an epoch as nnU-Net and the CPR trainers log them."""
    return [
        f"{STAMP} ",
        f"{STAMP}Epoch {number} ",
        f"{STAMP}Current learning rate: 0.00{number} ",
        f"{STAMP}CPR: step {250 * number}, measure/bound 0.9000, bounds set 100% ",
        f"{STAMP}train_loss -0.{number}5 ",
        f"{STAMP}val_loss -1e-0{number} ",
        f"{STAMP}Pseudo dice [np.float32(0.{number}), np.float32(nan), 0.5] ",
        f"{STAMP}Epoch time: 1{number}.5 s ",
        f"{STAMP}Yayy! New best EMA pseudo Dice: 0.{number} ",
    ]


LINES = [line for number in range(1, 6) for line in epoch(number)]


def read(folder: Path, lines: list[str], end: str = "\n") -> tuple[pd.DataFrame, object]:
    (folder / NAME).write_text("\n".join(lines) + end, encoding="utf-8", newline="")
    return read_logs(folder), read_progress(folder)


def test_epochs_of_nnunet_are_found(tmp_path: Path) -> None:
    log, progress = read(tmp_path, ["Please cite the following paper", *LINES])
    assert log["epoch"].tolist() == [1, 2, 3, 4, 5]
    assert log["train_loss"].tolist() == [-0.15, -0.25, -0.35, -0.45, -0.55]
    assert log["pseudo_dice"].tolist() == pytest.approx([0.3, 0.35, 0.4, 0.45, 0.5])
    assert log["seconds"].tolist() == [11.5, 12.5, 13.5, 14.5, 15.5]
    assert progress == (6, pytest.approx(0.5))


def test_interrupted_epoch_has_what_was_logged(tmp_path: Path) -> None:
    lines = [*epoch(1), *epoch(2)[:5], "Warning: val_loss 7", f"{STAMP}val_loss nan "]
    log, progress = read(tmp_path, lines)
    assert log["train_loss"].tolist() == [-0.15, -0.25]
    assert log.iloc[1][["val_loss", "pseudo_dice", "seconds"]].isna().all()
    assert progress == (2, pytest.approx(0.3))


def test_later_log_replaces_epochs(tmp_path: Path) -> None:
    read(tmp_path, LINES)
    later = [line.replace("train_loss -0.5", "train_loss 9.") for line in epoch(5)]
    (tmp_path / "training_log_2026_1_10_00_00_00.txt").write_text("\n".join(later) + "\n")
    assert read_logs(tmp_path)["train_loss"].tolist() == [-0.15, -0.25, -0.35, -0.45, 9.5]


def test_time_of_a_prediction_is_the_median_between_two_starts(tmp_path: Path) -> None:
    assert math.isnan(seconds_per_case(tmp_path))
    starts = ("03:04:05.000000", "03:04:07.500000", "03:04:10.000000", "03:09:10.000000")
    lines = [f"2026-01-02 {start}: predicting case_{i} " for i, start in enumerate(starts)]
    read(tmp_path, [*LINES, *lines])
    assert seconds_per_case(tmp_path) == 2.5
