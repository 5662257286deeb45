"""Training logs: the fast search for nnU-Net's epochs gives what reading line by line gives."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr.nnunet import fold_files
from nnunet_cpr.nnunet.fold_files import read_logs, read_progress
from tests.helpers.examples import examples

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
INSERTED = [
    "",
    "no stamp",
    f"{STAMP}Epoch 3 ",
    f"{STAMP}Epoch 3",
    f"{STAMP}Epoch 3 of 9 ",
    "Warning: Epoch 2",
    "Warning: train_loss 7",
    f"{STAMP}a: Epoch 4 ",
    f"{STAMP}train_loss 1e39 ",
    f"{STAMP}train_loss nan ",
    f"{STAMP}val_loss  2.",
    f"{STAMP}val_loss x",
    f"{STAMP}Pseudo dice ",
    f"{STAMP}Pseudo dice [2, 0.25]",
    f"{STAMP}Pseudo dice [0.1]\u2028{STAMP}Epoch 1 ",
    f"{STAMP}Epoch time: 7 s",
    f"{STAMP}Epoch time: 1e999 s ",
    f"{STAMP}Epoch time: x s ",
    f"{STAMP}Current\x0b{STAMP}Epoch time: 8 s ",
    "2026-01-02 03:04:05: Epoch 5 ",
    "2026-01-02 03:04:05: Epoch time: 9 s",
]


def read(folder: Path, lines: list[str], end: str = "\n") -> tuple[pd.DataFrame, object]:
    (folder / NAME).write_text("\n".join(lines) + end, encoding="utf-8", newline="")
    return read_logs(folder), read_progress(folder)


@examples(200, search=5000)
@given(data=st.data())
def test_fast_search_equals_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fold")
    lines = list(LINES)
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["insert", "delete", "swap", "cut"]))
        if change == "insert":
            lines.insert(position, data.draw(st.sampled_from(INSERTED)))
        elif change == "delete":
            lines.pop(position)
        elif change == "swap":
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[position], lines[other] = lines[other], lines[position]
        else:
            lines[position] = lines[position][: data.draw(st.integers(0, len(lines[position])))]
    fast, progress = read(folder, lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_files, "_BLOCK", re.compile("(?!)"))
        slow, expected = read(folder, lines)
    pd.testing.assert_frame_equal(fast, slow)
    assert progress == expected


def test_epochs_of_nnunet_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_files, "_add_lines", lambda *_: pytest.fail("read line by line"))
    log, progress = read(tmp_path, ["Please cite the following paper", *LINES])
    assert log["epoch"].tolist() == [1, 2, 3, 4, 5]
    assert log["train_loss"].tolist() == [-0.15, -0.25, -0.35, -0.45, -0.55]
    assert log["pseudo_dice"].tolist() == pytest.approx([0.3, 0.35, 0.4, 0.45, 0.5])
    assert log["seconds"].tolist() == [11.5, 12.5, 13.5, 14.5, 15.5]
    assert progress == (6, pytest.approx(0.5), 13.5)
