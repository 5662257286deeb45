from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.golden.fold_files import HELD, VERDICTS, read_history, train
from tests.golden.goldens import read_golden

if TYPE_CHECKING:
    from tests.helpers.workspace import Workspace

GOLDEN = read_golden("history")


@pytest.fixture(scope="module")
def fold(workspace: Workspace) -> Path:
    return train(workspace, HELD)


def test_history_has_the_same_columns_and_rows(fold: Path) -> None:
    found = read_history(fold)
    assert found["columns"] == GOLDEN["columns"]
    assert [row[:3] for row in found["rows"]] == [row[:3] for row in GOLDEN["rows"]]


def test_history_has_the_same_values(fold: Path) -> None:
    for found, expected in zip(read_history(fold)["rows"], GOLDEN["rows"], strict=True):
        measure, kappa, multiplier = map(float, found[3:])
        assert [measure, kappa] == pytest.approx([float(v) for v in expected[3:5]], rel=1e-3), found[:3]
        assert multiplier == pytest.approx(float(expected[5]), abs=1e-5), found[:3]


def test_fold_has_the_documented_files(fold: Path) -> None:
    names = {path.name for path in fold.iterdir()}
    assert names >= {"checkpoint_final.pth", "cpr_history.csv", "cpr_progress.png", "progress.png"}
    assert (fold / "cpr_progress.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not [name for name in names if name.startswith((".", "tmp"))]


def test_epoch_has_a_line_of_cpr_in_the_log(fold: Path) -> None:
    (log,) = fold.glob("training_log_*.txt")
    assert [int(step) for step in re.findall(r"CPR: step (\d+)", log.read_text())] == [2, 4, 6]


FIRST, *OTHERS = list(VERDICTS)[1:]


@pytest.mark.parametrize(
    "trainer", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_log_ends_with_the_verdict(trainer: str, workspace: Workspace) -> None:
    assert_verdict(train(workspace, trainer), VERDICTS[trainer])


@pytest.mark.slow
def test_verdict_counts_limited_corrections(workspace: Workspace) -> None:
    (log,) = train(workspace, "nnUNetTrainerCPR_k1en5_mu1e1_seed1_3epochs_2iters").glob(
        "training_log_*.txt"
    )
    *_, last = [line for line in log.read_text().splitlines() if line.strip()]
    assert re.search(r"too tight.*; \d+ corrections were limited, which sets a matrix to 0; ", last)


def test_log_of_held_bounds_says_so(fold: Path) -> None:
    assert_verdict(fold, VERDICTS[HELD])


def assert_verdict(fold: Path, verdict: str) -> None:
    """Check the last line of a log."""
    (log,) = fold.glob("training_log_*.txt")
    *_, last = [line for line in log.read_text().splitlines() if line.strip()]
    assert [words for words in VERDICTS.values() if words in last] == [verdict], last
