"""Runs of a cascade and of its previous stage."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.cascades import prerequisites, runs_without_predictions
from nnunet_cpr.studies.state import StudyPaths
from nnunet_cpr.studies.status import dry_run_lines
from nnunet_cpr.studies.study import Study
from nnunet_cpr.studies.worker import Worker
from tests.reports.folds import both, write_fold, write_json


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


def test_names_of_cases_with_dots_have_their_predictions(data: dict[str, str], tmp_path: Path) -> None:
    """Such as the identifiers of DICOM series."""
    study = cascade((0,), "3d_cascade_fullres")
    paths = StudyPaths(tmp_path / "results", tmp_path / "study", Path(data["nnUNet_preprocessed"]))
    home = Path(data["nnUNet_preprocessed"]) / "Dataset001_A"
    stages = {"3d_cascade_fullres": {"previous_stage": "3d_lowres"}}
    write_json(home / "nnUNetPlans.json", {"configurations": stages})
    write_json(home / "splits_final.json", [{"train": [], "val": ["1.3.6", "1.3.7"]}])
    upper = next(study.runs())
    stage = replace(upper, configuration="3d_lowres")
    folder = stage.folder(paths.results).parent / "predicted_next_stage" / upper.configuration
    folder.mkdir(parents=True)
    (folder / "1.3.6.npz").touch()
    assert runs_without_predictions(upper, paths) == [stage]
    (folder / "1.3.7.b2nd").touch()
    assert runs_without_predictions(upper, paths) == []


def test_lower_stage_is_validated_again_where_its_predictions_are_missing(
    data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that were copied without predicted_next_stage; nnU-Net's command is a stand-in."""
    study = cascade((0, 1), "3d_lowres", "3d_cascade_fullres")
    paths = StudyPaths(tmp_path / "results", tmp_path / "study", Path(data["nnUNet_preprocessed"]))
    home = Path(data["nnUNet_preprocessed"]) / "Dataset001_A"
    stages = {"3d_lowres": {}, "3d_cascade_fullres": {"previous_stage": "3d_lowres"}}
    write_json(home / "nnUNetPlans.json", {"configurations": stages})
    folds = [{"train": ["b"], "val": ["a"]}, {"train": ["a"], "val": ["b"]}]
    write_json(home / "splits_final.json", folds)
    runs = [*study.runs()]
    lower = [run for run in runs if run.configuration == "3d_lowres"]
    for run in lower:
        folder = write_fold(tmp_path, run.trainer, run.fold, {"ab"[run.fold]: both(0.8)}, run.dataset)
        shutil.copytree(folder, run.folder(paths.results))
        with zipfile.ZipFile(run.folder(paths.results) / "checkpoint_final.pth", "w") as checkpoint:
            checkpoint.writestr("data.pkl", "")
    upper = next(run for run in runs if run.configuration == "3d_cascade_fullres" and run.fold == 1)
    needed = [run for run in lower if run.trainer == upper.trainer]
    assert runs_without_predictions(upper, paths) == needed
    assert not runs_without_predictions(needed[0], paths)
    said = [line for line in dry_run_lines(study, paths, []) if line.startswith("again --val: ")]
    assert len(said) == len(lower) and "3d_lowres__fold_0, whose predictions for 3d_casc" in said[0]
    calls = []

    def validate(self: Worker, request: object, *options: str) -> None:
        calls.append((self.run, options))
        if self.run in needed and len(calls) < 3:
            folder = (
                self.run.folder(paths.results).parent / "predicted_next_stage" / "3d_cascade_fullres"
            )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{'ab'[self.run.fold]}.b2nd").touch()

    monkeypatch.setattr(Worker, "_run_nnunet", validate)
    with pytest.raises(Refusal, match=r"expected .*summary\.json with all cases"):
        Worker(upper, paths)()  # the stand-in trains nothing
    assert calls[:2] == [(run, ("--val",)) for run in needed] and calls[2][0] == upper
    assert not runs_without_predictions(upper, paths)
    other = replace(upper, trainer=next(run.trainer for run in lower if run not in needed))
    with pytest.raises(Refusal, match="its validation has not written the predictions"):
        Worker(other, paths)()
    first = replace(other, configuration="3d_lowres", fold=0).folder(paths.results)
    (first / "checkpoint_final.pth").unlink()
    with pytest.raises(Refusal, match=r"or checkpoint_final\.pth to make them, got neither"):
        Worker(other, paths)()
