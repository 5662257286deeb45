"""Plans for a CPU or a first try."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app


def configuration(patch: list[int], pooled: list[int]) -> dict:
    """Return a configuration whose network pools each axis so many times in seven stages."""
    strides = [[2 if stage < times else 1 for times in pooled] for stage in range(7)]
    network = {"n_stages": 8, "strides": [[1] * len(patch), *strides], "features_per_stage": [32] * 8}
    return {"batch_size": 12, "patch_size": patch, "architecture": {"arch_kwargs": network}}


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "Dataset004_Toy").mkdir()

    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, ["prepare", "plans", *arguments])
        assert done.exit_code == status, done.output
        return done.output

    return run


def test_small_plans_keep_what_the_network_needs(prepare, tmp_path: Path) -> None:
    given = {
        "plans_name": "nnUNetPlans",
        "configurations": {
            "2d": configuration([512, 320], [7, 6]),
            "3d_fullres": configuration([40, 128, 128], [3, 5, 4]),
            "3d_cascade_fullres": {"inherits_from": "3d_fullres"},
        },
    }
    (tmp_path / "Dataset004_Toy" / "nnUNetPlans.json").write_text(json.dumps(given))
    assert "2d, 3d_fullres. Next:" in prepare("4", "--small")
    made = json.loads((tmp_path / "Dataset004_Toy" / "nnUNetPlansSmall.json").read_text())
    assert made["plans_name"] == "nnUNetPlansSmall"
    flat, deep, cascade = made["configurations"].values()
    assert flat["patch_size"] == [256, 128], "two voxels in the last stage"
    assert deep["patch_size"] == [40, 64, 64] and deep["batch_size"] == 2
    assert deep["architecture"]["arch_kwargs"]["features_per_stage"] == [8 * 2**n for n in range(8)]
    assert cascade == {"inherits_from": "3d_fullres"}


def test_plans_that_are_not_there_are_one_line(prepare) -> None:
    said = prepare("4", "--small", status=1)
    assert "nnUNetPlans.json: no such plans; run nnUNetv2_plan_and_preprocess first" in said
    assert "expected `plans DATASET --small`" in prepare("4", status=1)
    assert "Dataset" in prepare("5", "--small", status=1)
