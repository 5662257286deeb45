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
from tests.reports.folds import DATASET, both, write_fold, write_json

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


def test_plan_from_assumptions_fits_the_terminal(results: Path) -> None:
    said = plan("quick", "--dataset", DATASET, "--folds", "all", "--seeds", "1-3")
    assert max(map(len, said.splitlines())) <= 80
    assert said.startswith("with 5 folds and 3 seeds, 8 of 10 studies find a difference of 1.")
    assert "ACDC                0.60     0.46 0.33" in said and "lesions             1.87" in said
    assert "36 cases a fold, 1 comparison\n" in said
    assert said.endswith("0 of 30 done; 7,500,000 training steps left\n")


def test_plan_like_finished_runs_has_their_deviations_cases_and_hours(results: Path) -> None:
    of_study = ("--trainers", ",".join(TRAINERS), "--dataset", DATASET, "--seeds", "11-13")
    said = " ".join(plan(*of_study, "--like", "pilot").split())
    assert " study pilot 0.00 1.12 " in said and "ACDC" not in said
    assert "6 cases a fold" in said
    assert "0 of 30 done; 75,000 training steps left; about 9.0 hours, one run at a time" in said
    assert "20 cases a fold" in plan(*of_study, "--like", "pilot", "--cases", "20")


def test_plan_over_data_sets_is_said_and_in_json(results: Path) -> None:
    study = ("--trainers", ",".join(TRAINERS), "-d", "Dataset001_A")
    several = (*study, "-d", "Dataset002_B", "-d", "Dataset003_C")
    said = plan(*several)
    assert max(map(len, said.splitlines())) <= 80
    words = " ".join(said.split())
    assert words.startswith("over 3 data sets with 5 folds and 1 seed, 8 of 10 studies find a mean diff")
    assert "on one, with 5 folds and 1 seed there is no verdict on a data set" in words
    found = json.loads(plan(*several, "--json"))
    assert " ".join(found["sentence"].split()) in words and found["datasets"] == 3
    rows = {row["title"]: row for row in found["deviations"]}
    assert rows["lesions"]["found_over_datasets"] > rows["organs"]["found_over_datasets"] > 2
    assert "found_over_datasets" not in json.loads(plan(*study, "--json"))["deviations"][0]


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
