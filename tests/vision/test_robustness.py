"""The figure of a metric over the weight decay, and results that come with the source."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.helpers import ROOT
from tests.helpers.study_run import COMMAND

sys.path.insert(0, str(ROOT))

from benchmarks.vision import robustness


def test_weight_decays_and_defaults_are_read_and_drawn(tmp_path: Path) -> None:
    runs = {
        "SGD_lr0p1_wd1en3": 80.0,
        "SGD_lr0p1_wd1en2": 10.0,
        "SGD_lr0p3_wd1en3": 82.0,
        "SGD_lr0p3_wd1en2": 81.0,
        "SGDCPR_lr0p1": 80.5,
        "SGDCPR_lr0p3": np.nan,  # not finished
        "SGDCPR_ws20_lr0p1": 70.0,  # a choice, and a comparison method: not drawn
        "AdamW_cautious": 60.0,
    }
    table = pd.DataFrame({"run": list(runs), "mean": list(runs.values()), "std": 0.5})
    table.to_csv(tmp_path / "cifar10.csv", index=False)
    found = robustness.read(tmp_path / "cifar10.csv", "cifar10")
    assert found["mean"].tolist() == [80.0, 10.0, 82.0, 81.0, 80.5]
    assert found["steps"].unique().tolist() == [600]
    cpr = found[found["decay"].isna()]
    assert (cpr["lr"].tolist(), cpr["optimizer"].tolist()) == ([0.1], ["sgd"])
    short = pd.DataFrame({"run": ["SGD_5000steps", "SGDCPR_mu0p5"], "mean": 80.0, "std": 0.5})
    short.to_csv(tmp_path / "long.csv", index=False)
    (row,) = robustness.read(tmp_path / "long.csv", "cifar10").to_dict("records")
    assert (row["lr"], row["steps"], row["decay"]) == (0.1, 5000, 5e-4)
    both = pd.DataFrame({"run": ["SGD_5000steps", "SGD_lr0p3"], "mean": 80.0, "std": 0.5})
    both.to_csv(tmp_path / "both.csv", index=False)
    with pytest.raises(ValueError, match="differ in learning rate or in steps, not in both"):
        robustness.read(tmp_path / "both.csv", "cifar10")
    empty = found.iloc[:0]
    robustness.draw([found, empty], "accuracy", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_results_that_come_with_the_source_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(ROOT / "benchmarks" / "vision" / "results" / "cifar10.tar.xz") as archive:
        archive.extractall("vision-results", filter="data")
    sweeps = ("cifar10", "cifar10-steps", "cifar10-long")
    for sweep in sweeps:
        subprocess.run([*COMMAND, "vision", "draw", sweep], check=True)
    first, second, long = (
        pd.read_csv(f"vision-results/{sweep}-methods.csv").set_index("method") for sweep in sweeps
    )
    assert first["n"].eq(5).all() and second["n"].eq(5).all()
    default = first.loc["Muon + CPR, default", ["difference", "low", "high"]]
    assert default.tolist() == pytest.approx([1.17, -0.09, 2.43], abs=0.005)
    columns = ["difference", "low", "high", "p"]
    assert long["n"].eq(10).all()
    sgd, adam = (long.loc[name, columns].tolist() for name in ("SGD + CPR", "Adam + CPR"))
    assert sgd == pytest.approx([2.566, 1.502, 3.630, 0.001], abs=0.001)
    assert adam == pytest.approx([1.095, 0.314, 1.876, 0.035], abs=0.001)


@pytest.mark.slow
def test_results_on_text_that_come_with_the_source_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(ROOT / "benchmarks" / "vision" / "results" / "text.tar.xz") as archive:
        archive.extractall("vision-results", filter="data")
    subprocess.run([*COMMAND, "vision", "draw", "text"], check=True)
    methods = pd.read_csv("vision-results/text-methods.csv").set_index("method")
    assert methods["n"].eq(3).all()
    columns = ["difference", "low", "high", "p"]
    as_long = methods.loc["Adam + CPR, 800 steps", columns].tolist()
    shorter = methods.loc["Adam + CPR, 600 steps", columns].tolist()
    assert as_long == pytest.approx([0.013, -0.744, 0.770, 1.0], abs=0.001)
    assert shorter == pytest.approx([-1.873, -2.704, -1.043, 0.045], abs=0.001)
