"""Reports of trainings that this package has not run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app

STUDY = """
datasets: Dataset042_Liver
folds: 0-4
trainers:
  - nnUNetTrainer
  - {trainer: nnUNetTrainer, plans: nnUNetResEncUNetLPlans, label: ResEnc L}
  - {trainer: TheirTrainer, configuration: 2d}
"""
MODELS = {
    "nnUNetTrainer__nnUNetPlans__3d_fullres": 0.0,
    "nnUNetTrainer__nnUNetResEncUNetLPlans__3d_fullres": 0.02,
    "TheirTrainer__nnUNetPlans__2d": -0.01,
}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Return results of 5 folds of 4 cases, in which models differ by constants and noise."""
    generator = np.random.default_rng(0)
    dice = generator.uniform(0.6, 0.9, 20)
    for model, difference in MODELS.items():
        for fold in range(5):
            cases = []
            for case in range(4 * fold, 4 * fold + 4):
                value = dice[case] + difference + generator.normal(0, 0.001)
                names = {
                    f"{kind}_file": f"/elsewhere/{kind}/{case}.nrrd"
                    for kind in ("prediction", "reference")
                }
                cases.append({"metrics": {"1": {"Dice": value}, "(1, 2)": {"Dice": value}}, **names})
            folder = tmp_path / "Dataset042_Liver" / model / f"fold_{fold}" / "validation"
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps({"metric_per_case": cases}))
    return tmp_path


@pytest.mark.parametrize("has_names", [True, False])
def test_plans_and_configurations_of_others_are_compared(
    theirs: Path, has_names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nnU-Net's folders may lack the data set's description, and the data are elsewhere."""
    if has_names:
        labels = {"labels": {"background": 0, "liver": 1, "whole": [1, 2]}}
        for model in MODELS:
            (theirs / "Dataset042_Liver" / model / "dataset.json").write_text(json.dumps(labels))
    for name in ("nnUNet_raw", "nnUNet_preprocessed"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("nnUNet_results", str(theirs))
    (theirs / "theirs.yaml").write_text(STUDY)
    done = CliRunner().invoke(app, ["study", "report", str(theirs / "theirs.yaml")])
    assert done.exit_code == 0, done.output
    assert "ResEnc L instead of nnUNetTrainer: 2.0" in done.output
    assert "no verdict with 1 seed and 5 folds" in done.output
    assert "ResEnc L is nnUNetTrainer with plans nnUNetResEncUNetLPlans" in done.output
    report = theirs / "studies" / "theirs" / "report"
    rows = pd.read_csv(report / "comparisons.csv")
    np.testing.assert_allclose(sorted(rows["difference"]), [-1, 2], atol=0.1)
    cases = pd.read_csv(report / "cases.csv")
    assert len(cases) == 3 * 20 * 2
    assert set(cases["class"]) == ({"liver", "whole"} if has_names else {"label 1", "label 1 + 2"})
