"""Runs of a cascade and of its previous stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.cascades import prerequisites
from nnunet_cpr.studies.study import Study


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """Return nnU-Net's folders, with an empty one of a data set without plans."""
    (tmp_path / "nnUNet_preprocessed" / "Dataset001_A").mkdir(parents=True)
    return {"nnUNet_preprocessed": str(tmp_path / "nnUNet_preprocessed")}


def cascade(folds: tuple[int, ...], *configurations: str) -> Study:
    trainers = ["nnUNetTrainerSGD", "nnUNetTrainerCPR"]
    return Study(
        "s", ["Dataset001_A"], trainers, folds=folds, configurations=configurations, seeds=[1, 2]
    )


def test_cascade_needs_all_folds_of_its_previous_stage(data: dict[str, str]) -> None:
    stages = "3d_lowres", "3d_cascade_fullres"
    study = cascade((0, 1, 2, 3, 4), *stages)
    needed = prerequisites(study, data)
    assert len(needed) == 2 * 2 * 5
    for run, others in needed.items():
        assert run.configuration == "3d_cascade_fullres"
        assert {(other.trainer, other.seed) for other in others} == {(run.trainer, run.seed)}
        assert [(other.configuration, other.fold) for other in others] == [
            ("3d_lowres", fold) for fold in range(5)
        ]
    advice = r"write configurations \[3d_lowres, 3d_cascade_fullres\] and folds 0-4"
    for wrong in (cascade((0, 1), *stages), cascade((0, 1, 2, 3, 4), stages[1])):
        with pytest.raises(Refusal, match=advice):
            prerequisites(wrong, data)
    assert prerequisites(cascade((0,), "2d"), data) == {}


def test_cascade_of_an_entry_needs_an_entry_of_the_same_trainer(data: dict[str, str]) -> None:
    def study(first: str) -> Study:
        stages = zip((first, "nnUNetTrainerSGD"), ("3d_lowres", "3d_cascade_fullres"))
        entries = [{"trainer": trainer, "configuration": stage} for trainer, stage in stages]
        return Study("s", ["Dataset001_A"], entries, folds=[0, 1, 2, 3, 4])

    same = study("nnUNetTrainerSGD")
    needed = prerequisites(same, data)
    assert len(needed) == 5 and {other for others in needed.values() for other in others} == {
        run for run in same.runs() if run.configuration == "3d_lowres"
    }
    with pytest.raises(Refusal, match="by the same trainer"):
        prerequisites(study("nnUNetTrainerCPR"), data)
