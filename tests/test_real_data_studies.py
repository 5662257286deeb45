"""Studies on real data: their archives, tables and figures."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.results import read_results
from nnunet_cpr.reports.surface_metrics import add_surface_metrics
from nnunet_cpr.studies.definition import TrainerEntry, save
from nnunet_cpr.studies.run_state import Stage, StudyPaths, state_of
from tests.helpers import ROOT
from tests.helpers.report_folds import DATASET, both, study, whole, write_fold, write_history, write_log

sys.path.insert(0, str(ROOT))

from benchmarks.real_data import archive, differences, rates_and_lengths, robustness, steps_to_dice
from benchmarks.real_data.trainings import read_trainings


def test_archive_of_a_study_gives_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("nnUNet_results", str(first))
    toy = study("nnUNetTrainerSGD", "nnUNetTrainerCPR_ws5")
    for trainer, dice in zip(("nnUNetTrainerSGD", "nnUNetTrainerCPR_ws5"), (0.8, 0.9)):
        for fold in toy.folds:
            folder = write_fold(first, trainer, fold, {"a": both(dice), "b": both(dice / 2)})
            write_log(folder, {0: (0.1, 0.2, 0.5, 3.0)})
            (folder / "training_log_later.txt").write_text(f"written to {first}\n")
            write_history(folder)
            (folder / "checkpoint_final.pth").touch()
    save(toy, tmp_path / "toy.yaml")
    archive.pack(str(tmp_path / "toy.yaml"), tmp_path / "toy.tar.xz")
    archive.unpack([tmp_path / "toy.tar.xz"], second)
    before, after = (read_results(toy, folder) for folder in (first, second))
    pd.testing.assert_frame_equal(after.cases, before.cases)
    pd.testing.assert_frame_equal(after.epochs, before.epochs)
    assert len(list(second.rglob("cpr_history.csv"))) == 4
    files = [path for path in second.rglob("*") if path.is_file()]
    assert not any(path.suffix == ".pth" for path in files)
    archive.unpack([tmp_path / "toy.tar.xz"] * 2, tmp_path / "third", finished=True)
    paths = StudyPaths(tmp_path / "third", tmp_path)
    states = [state_of(run, paths).stage for run in toy.runs()]
    assert states == [Stage.DONE] * 4
    assert not any(word in path.read_text() for path in files for word in (str(tmp_path), "somewhere"))


def test_archive_keeps_surface_metrics_without_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("monai")
    toy = study("nnUNetTrainerSGD", metrics=("dice", "hd95", "nsd"))
    results, raw, preprocessed = whole(tmp_path, toy, cases=3)
    monkeypatch.setenv("nnUNet_results", str(results))
    before = add_surface_metrics(read_results(toy, results), raw, preprocessed)
    save(toy, tmp_path / "toy.yaml")
    archive.pack(str(tmp_path / "toy.yaml"), tmp_path / "toy.tar.xz")
    archive.unpack([tmp_path / "toy.tar.xz"], tmp_path / "other")
    after = add_surface_metrics(read_results(toy, tmp_path / "other"), None, None)
    pd.testing.assert_frame_equal(after.cases, before.cases)
    assert after.cases["hd95"].notna().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "interval"),
    [
        ("optimizers", "**84.76**", ""),
        ("methods", "**83.47**", "+0.76 to +2.14"),
        ("default_sgd", "**84.29**", "-0.33 to +0.49"),
        ("default_adam", "**83.95**", "-0.41 to +0.21"),
        ("default_muon", "**85.51**", "-0.60 to +0.62"),
        ("hippocampus_seeds", "**78.43**", "-0.69 to +0.14"),
        ("tuned_sgd", "**84.80**", ""),
        ("tuned_adam", "**84.15**", ""),
        ("tuned_muon", "**85.71**", ""),
        ("best_sgd", "**84.61**", "-0.80 to +0.16"),
        ("best_adam", "**84.30**", "-0.69 to -0.20"),
        ("best_muon", "**85.58**", "-0.47 to +0.54"),
        ("few_cases_10", "**83.10**", "-0.66 to +1.06"),
        ("few_cases_20", "**83.66**", "-0.61 to +0.42"),
        ("few_cases_40", "**84.02**", "-0.52 to +0.95"),
        ("acdc_sgd", "**77.19**", "-1.05 to +1.17"),
        ("acdc_tuned_sgd", "**78.32**", ""),
        ("acdc_best_sgd", "**78.11**", "-2.69 to +0.85"),
        ("acdc_adam", "**78.04**", "-1.64 to +1.54"),
        ("acdc_muon", "**81.93**", "-1.43 to +1.16"),
        ("rates_sgd", "**84.77**", ""),
        ("long_sgd", "**87.26**", "-0.67 to +0.64"),
        ("acdc_rates_sgd", "**78.32**", "-6.79 to -0.76"),
        ("acdc_lengths_sgd", "**78.32**", "-12.01 to +11.69"),
        ("lengths", "**88.66**", "+0.71 to +1.68"),
        ("lengths_cpr", "**88.66**", "-0.13 to +0.37"),
    ],
)
def test_results_that_come_with_the_source_give_a_report(
    name: str, number: str, interval: str, tmp_path: Path
) -> None:
    folder = ROOT / "benchmarks" / "real_data"
    archive.unpack([folder / "results" / f"{name}.tar.xz"], tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("nnUNet_")}
    done = subprocess.run(
        [sys.executable, "-c", "from nnunet_cpr.cli import main; main()", "study", "report"]
        + [str(folder / "studies" / f"{name}.yaml")],
        env={**environment, "nnUNet_results": str(tmp_path)},  # a report needs no data
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "studies" / name / "report" / "report.md").read_text()
    assert number in report and interval in report
    rows = differences.read(str(folder / "studies" / f"{name}.yaml"), tmp_path)
    assert any(interval == f"{row.low:+.2f} to {row.high:+.2f}" for row in rows) or not interval


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


def test_trainings_without_seeds_and_of_two_data_sets_have_their_own_dice(tmp_path: Path) -> None:
    names = ("nnUNetTrainerSGD", "nnUNetTrainerCPR")
    made = study(*names, datasets=(DATASET, "Dataset002_Other"), seeds=())
    dice = {run: 0.5 + 0.01 * i for i, run in enumerate(made.runs())}
    for run, value in dice.items():
        write_fold(tmp_path, run.trainer, run.fold, {"a": both(value)}, dataset=run.dataset)
    save(made, tmp_path / "toy.yaml")
    found = read_trainings(str(tmp_path / "toy.yaml"), tmp_path, lambda name, label: {"label": label})
    assert found["dice"].tolist() == pytest.approx([100 * value for value in dice.values()])
    assert found["label"].tolist() == [run.trainer for run in dice]


def test_settings_are_tabulated_and_drawn(tmp_path: Path) -> None:
    end = "_warmup10_2epochs_50iters"
    dice = {
        f"nnUNetTrainerSGD{end}": 0.80,
        f"nnUNetTrainerSGD_wd1en2{end}": 0.85,
        f"nnUNetTrainerSGD_wd1en1{end}": 0.10,
        f"nnUNetTrainerCPR{end}": 0.84,
        f"nnUNetTrainerCPR_ws50{end}": 0.83,
        f"nnUNetTrainerMuonCPR_ws50{end}": 0.90,
    }
    trainings = read_trainings(str(write_results(tmp_path, dice)), tmp_path, robustness.describe)
    assert len(trainings) == 12
    table = robustness.tabulate(trainings).set_index(["optimizer", "kind"])
    # Means of the two folds are 0.5 points above those of the first.
    assert table.loc["SGD", "weight decay"].tolist() == pytest.approx([80.5, 85.5, 1e-2, 10.5, 0.1])
    assert table.loc["SGD", "warm start"].tolist() == pytest.approx([84.5, 84.5, 20, 83.5, 50])
    muon = table.loc["Muon", "warm start"].tolist()
    assert muon == pytest.approx([math.nan, 90.5, 50, 90.5, 50], nan_ok=True)
    robustness.draw(trainings, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_settings_at_several_learning_rates_and_lengths_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = {
        "nnUNetTrainerSGD_lr1en1_2epochs_50iters": 0.80,
        "nnUNetTrainerSGD_wd1en2_lr1en1_2epochs_50iters": 0.85,
        "nnUNetTrainerCPR_lr1en1_2epochs_50iters": 0.84,
        "nnUNetTrainerSGD_lr3en1_2epochs_50iters": 0.75,
        "nnUNetTrainerSGD_wd1en2_lr3en1_2epochs_50iters": 0.10,
    }
    file = write_results(tmp_path, dice)
    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    figure = tmp_path / "figure.png"
    monkeypatch.setattr(sys, "argv", ["", str(file), str(file), "--figure", str(figure)])
    rates_and_lengths.main()
    # Means of the two folds are 0.5 points above those of the first.
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sgd", "0.1", "100", "84.5", "80.5", "85.5"] in lines
    assert ["0.3", "100", "NaN", "75.5", "10.5"] in lines
    assert figure.stat().st_size > 10_000 and figure.with_suffix(".csv").exists()

    (tmp_path / "other").mkdir()
    both_vary = {"nnUNetTrainerSGD_lr1en1_1epochs": 0.8, "nnUNetTrainerSGD_lr1en2_2epochs": 0.8}
    with pytest.raises(ValueError, match="in learning rate or in steps, not in both"):
        rates_and_lengths.read(str(write_results(tmp_path / "other", both_vary)), tmp_path / "other")
    chosen = write_results(tmp_path / "other", {"nnUNetTrainerCPR_ws5_lr1en2_2epochs": 0.8})
    with pytest.raises(ValueError, match="expected weight decay or CPR's default"):
        rates_and_lengths.read(str(chosen), tmp_path / "other")


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
