"""Studies on real data: their archives, tables and figures."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.results import read_results
from nnunet_cpr.studies.definition import TrainerEntry, save
from tests.helpers import ROOT
from tests.helpers.report_folds import both, study, write_fold, write_log

sys.path.insert(0, str(ROOT))

from benchmarks.real_data import archive, differences, steps_to_dice
from benchmarks.real_data.trainings import read_trainings


def test_results_that_come_with_the_source_give_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/golden/test_reports.py has the numbers of all studies."""
    folder = ROOT / "benchmarks" / "real_data"
    archive.unpack([folder / "results" / "best_adam.tar.xz"], tmp_path)
    for name in ("nnUNet_raw", "nnUNet_preprocessed"):
        monkeypatch.delenv(name, raising=False)  # a report needs no data
    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    file = str(folder / "studies" / "best_adam.yaml")
    done = CliRunner().invoke(app, ["study", "report", file])
    assert done.exit_code == 0, done.output
    report = (tmp_path / "studies" / "best_adam" / "report" / "report.md").read_text()
    assert "**84.30**" in report and "-0.69 to -0.20" in report
    rows = differences.read(file, tmp_path)
    assert any(f"{row.low:+.2f} to {row.high:+.2f}" == "-0.69 to -0.20" for row in rows)


def test_evidence_pages_have_the_report_of_each_archived_study(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "scripts" / "evidence.py"))
    archives = sorted((ROOT / "benchmarks" / "real_data" / "results").glob("*.tar.xz"))
    pages = {script["page_of"](path.name.removesuffix(".tar.xz")) for path in archives}
    assert pages == set(script["PAGES"])
    archive.unpack([path for path in archives if path.name == "best_adam.tar.xz"], tmp_path)
    answer, _, details = script["study_section"]("best_adam", tmp_path).partition('??? note "Details"')
    assert answer.startswith("## best_adam {#best_adam}")
    assert "Adam + CPR default -0.45 (-0.69 to -0.20)" in answer and "**84.30**" in answer
    assert "| -0.69 to -0.20 | 0.0043 |" in details and "Anterior" in details


def write_results(results: Path, dice: dict[str, float]) -> Path:
    """Write a study of these Dice values on the first of two folds, 0.01 better on the second.

    Returns:
        The study file, in which the label of a trainer is its family before a comma.
    """
    entries = []
    for name in dice:
        family, _, settings = name.removeprefix("nnUNetTrainer").partition("_")
        entries.append(TrainerEntry(trainer=name, label=f"{family}, {settings}"))
    made = study(*entries, seeds=(1,))
    for run in made.runs():
        write_fold(results, run.trainer, run.fold, {"a": both(dice[run.entry] + 0.01 * run.fold)})
    save(made, results / "toy.yaml")
    return results / "toy.yaml"


def test_differences_name_the_selected_method(tmp_path: Path) -> None:
    dice = {"nnUNetTrainerSGD_wd1en3": 0.8, "nnUNetTrainerSGD_wd1en2": 0.7, "nnUNetTrainerCPR": 0.85}
    entries = [TrainerEntry(trainer=name, group=name[13:16]) for name in dice]
    made = study(*entries, seeds=(1, 2, 3), select=True)
    for run in made.runs():
        assert run.seed is not None
        value = dice[run.entry] + 0.001 * run.seed
        write_fold(tmp_path, run.trainer, run.fold, {f"{run.fold}{i}": both(value) for i in "ab"})
    save(made, tmp_path / "toy.yaml")
    folder = tmp_path / "studies" / "toy" / "report"
    write_report(made, tmp_path, None, None, folder, Console(file=io.StringIO()))
    (row,) = differences.read(str(tmp_path / "toy.yaml"), tmp_path)
    assert (row.data, row.title, row.reference, row.uses_cpr) == ("Toy", "CPR", "SGD", True)
    assert row.difference == pytest.approx(5)
    other = row._replace(reference="Muon", difference=-50.0)
    differences.draw([row, other], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_steps_for_a_dice_are_interpolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines in the logarithm of the steps: 60 to 80 percent for SGD, 70 to 90 for Muon."""
    dice = {
        "nnUNetTrainerSGD_1epochs_100iters": 0.60,
        "nnUNetTrainerSGD_10epochs_100iters": 0.80,
        "nnUNetTrainerMuon_warmup10_1epochs_100iters": 0.70,
        "nnUNetTrainerMuon_warmup10_10epochs_100iters": 0.90,
    }
    trainings = read_trainings(str(write_results(tmp_path, dice)), tmp_path, steps_to_dice.describe)
    table = steps_to_dice.tabulate(trainings, "SGD").set_index(["goal", "optimizer"])
    assert table.loc[(100, "SGD")].tolist() == pytest.approx([100, 100, 10 ** (2 + 0.5 / 20)])
    assert table.loc[(1000, "SGD")].tolist() == pytest.approx([1000, 10 ** (2 + 19.5 / 20), np.inf])
    assert table.loc[(100, "Muon")].tolist() == pytest.approx([100, 100, 100])
    half = 10 ** np.array([2.5, 2 + 9.5 / 20, 2 + 10.5 / 20])  # the folds are 1 point apart
    assert table.loc[(1000, "Muon")].tolist() == pytest.approx(half)
    assert np.isinf(steps_to_dice.steps_needed(np.array([100, 1000]), np.array([1.0, 2.0]), 3.0))
    steps_to_dice.draw(trainings, tmp_path / "figure.png")
    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    command = ["steps_to_dice", str(tmp_path / "toy.yaml"), "--figure", str(tmp_path / "figure.png")]
    monkeypatch.setattr(sys, "argv", command)
    steps_to_dice.main()
    assert "Steps for the mean Dice of SGD at each length" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--reference", "Adam"])
    with pytest.raises(SystemExit):
        steps_to_dice.main()
    assert "--reference: expected one of SGD, Muon, got Adam" in capsys.readouterr().err
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_packed_study_has_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("nnUNet_results", str(tmp_path / "first"))
    toy = study("nnUNetTrainerSGD", "nnUNetTrainerCPR_ws5")
    for run in toy.runs():
        folder = write_fold(tmp_path / "first", run.trainer, run.fold, {"a": both(0.8 + 0.1 * run.fold)})
        write_log(folder, {0: (0.1, 0.2, 0.5, 3.0)})
        (folder / "checkpoint_final.pth").touch()
    save(toy, tmp_path / "toy.yaml")
    archive.pack(str(tmp_path / "toy.yaml"), tmp_path / "toy.tar.xz")
    archive.unpack([tmp_path / "toy.tar.xz"], tmp_path / "second")
    before, after = (read_results(toy, tmp_path / name) for name in ("first", "second"))
    pd.testing.assert_frame_equal(after.cases, before.cases)
    pd.testing.assert_frame_equal(after.epochs, before.epochs)
    files = [path for path in (tmp_path / "second").rglob("*") if path.is_file()]
    assert not any(path.suffix == ".pth" or str(tmp_path) in path.read_text() for path in files)
