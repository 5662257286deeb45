"""``nnunet-cpr study plan``."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.studies.study import Study
from nnunet_cpr.studies.study_file import save
from tests.reports.folds import DATASET, both, write_fold, write_json, write_log

TRAINERS = ("nnUNetTrainerSGD_10epochs", "nnUNetTrainerCPR_10epochs")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return nnUNet_results with a finished study "pilot" of 2 folds x 2 seeds, 18 minutes a run."""
    results = tmp_path / "nnUNet_results"
    monkeypatch.setenv("nnUNet_results", str(results))
    monkeypatch.setenv("COLUMNS", "80")
    pilot = Study("pilot", [DATASET], TRAINERS, folds=[0, 1], seeds=[1, 2])
    (results / "studies" / "pilot").mkdir(parents=True)
    save(pilot, results / "studies" / "pilot" / "study.yaml")
    rng = np.random.default_rng(0)
    for run in pilot.runs():
        dice = {f"case_{run.fold}{case}": both(rng.uniform(0.8, 0.9)) for case in range(6)}
        folder = write_fold(results, run.trainer, run.fold, dice)
        with zipfile.ZipFile(folder / "checkpoint_final.pth", "w") as checkpoint:
            checkpoint.writestr("data.pkl", "")
        write_json(folder / "resources.json", {"seconds": 1080.0})
    return results


def plan(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["study", "plan", *arguments])
    assert done.exit_code == status, done.output
    return done.output


def test_plan_is_an_answer_and_its_cost(results: Path) -> None:
    answer, cost = plan("quick", "--dataset", DATASET).splitlines()
    assert answer.startswith("with 3 folds and 3 seeds, 8 of 10 studies find a difference of 1.")
    assert answer.endswith(", with assumed 36 cases a fold, if runs vary as assumed")
    assert cost.startswith("0 of 18 done; 135,000 training steps left; hours unknown, as no training")


def test_plan_has_the_cases_of_the_data_sets_own_folds(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessed = results.parent / "nnUNet_preprocessed"
    monkeypatch.setenv("nnUNet_preprocessed", str(preprocessed))
    names = [f"case_{number}" for number in range(30)]
    folds = [{"train": [n for n in names if n not in names[i::3]], "val": names[i::3]} for i in range(3)]
    write_json(preprocessed / DATASET / "splits_final.json", folds)
    few = plan("quick", "--dataset", DATASET)
    assert ", with 10 cases a fold, if runs" in few
    assert ", with 36 cases a fold, if runs" in plan("quick", "--dataset", DATASET, "--cases", "36")
    (preprocessed / DATASET / "splits_final.json").unlink()
    monkeypatch.setenv("nnUNet_raw", str(results.parent / "raw"))
    write_json(results.parent / "raw" / DATASET / "dataset.json", {"numTraining": 60})
    assert ", with 12 cases a fold, if runs" in plan("quick", "--dataset", DATASET), "nnU-Net's split"


@pytest.mark.parametrize(
    ("training", "said"),
    [(2, ", with 1 case a fold, if runs"), (-5, ", with assumed 36 cases a fold, if runs")],
)
def test_plan_of_a_tiny_or_impossible_data_set(
    results: Path, monkeypatch: pytest.MonkeyPatch, training: int, said: str
) -> None:
    monkeypatch.setenv("nnUNet_raw", str(results.parent / "raw"))
    write_json(results.parent / "raw" / DATASET / "dataset.json", {"numTraining": training})
    assert said in plan("quick", "--dataset", DATASET)


def test_hours_are_those_of_any_training_on_these_data(results: Path) -> None:
    fold = results / DATASET / "TheirTrainer__nnUNetPlans__3d_fullres" / "fold_0"
    fold.mkdir(parents=True)
    write_log(fold, {epoch: (0.5, 0.5, 0.3, 40.0) for epoch in range(3)})
    cost = plan("quick", "--dataset", DATASET).splitlines()[1]
    assert cost.endswith("about 6.0 hours, one run at a time")  # 18 x 30 epochs of 40 s


def test_plan_like_finished_runs_has_their_deviations_and_hours(results: Path) -> None:
    of_study = ("--trainers", ",".join(TRAINERS), "--dataset", DATASET, "--seeds", "11-13")
    answer, cost = plan(*of_study, "--like", "pilot", "--cases", "20").splitlines()
    assert answer.endswith(", with 20 cases a fold, if runs vary as in study pilot")
    assert cost == "0 of 30 done; 75,000 training steps left; about 9.0 hours, one run at a time"


def test_plan_like_finished_runs_has_their_cases_where_no_file_says_them(results: Path) -> None:
    of_study = ("--trainers", ",".join(TRAINERS), "--dataset", DATASET, "--seeds", "11-13")
    assert ", with 6 cases a fold, if runs vary as in study pilot\n" in plan(
        *of_study, "--like", "pilot"
    )


def test_plan_over_data_sets_is_said_and_in_json(results: Path) -> None:
    study = ("--trainers", ",".join(TRAINERS), "-d", "Dataset001_A")
    several = (*study, "-d", "Dataset002_B", "-d", "Dataset003_C")
    answer, cost = plan(*several).splitlines()
    assert answer.startswith(
        "over 3 data sets with 5 folds and 1 seed, 8 of 10 studies find a mean diff"
    )
    assert "on one, with 5 folds and 1 seed there is no verdict on a data set" in answer
    assert json.loads(plan(*several, "--json")) == {"answer": answer, "cost": cost}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["quick"], "study quick: expected a data set, got none; add --dataset"),
        (["--trainers", TRAINERS[0], "-d", DATASET], "study study: expected two trainers to compare"),
        (["pilot", "--like", "quick"], "study quick: expected a data set, got none"),
        (["pilot", "--like", "nothing"], "study 'nothing': expected a file"),
        (["pilot", "--like", "one.yaml"], "study one: expected two trainers with two folds, two seeds"),
    ],
)
def test_plan_ends_with_one_line(
    results: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str
) -> None:
    monkeypatch.chdir(results)
    save(Study("one", [DATASET], TRAINERS, folds=[0], seeds=[1, 2]), results / "one.yaml")
    said = plan(*arguments, status=1)
    assert said.startswith(f"nnunet-cpr: {error}") and said.count("\n") == 1
