"""``nnunet-cpr study predict`` on small networks, against nnU-Net's own predictor."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import torch
import yaml
from nnunetv2.postprocessing.remove_connected_components import (
    remove_all_but_largest_component_from_segmentation as keep_largest,
)
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies import prediction
from nnunet_cpr.studies.prediction import find_images, select_ensemble
from nnunet_cpr.studies.study import Study
from tests.helpers.workspace import PLANS, UNSEEN, Workspace
from tests.studies.study_run import COMMAND, wait_for

TRAINER = "nnUNetTrainerCPR_1epochs"
CASCADE = "3d_cascade_fullres"
STUDY = {
    "datasets": "Dataset901_Phantoms", "plans": PLANS, "folds": [0, 1], "seeds": [1, 2],
    "trainers": [{"trainer": TRAINER, "label": "CPR"}, {"trainer": "nnUNetTrainerSGD"}],
}  # fmt: skip


def make_models(space: Workspace, *configurations: str) -> None:
    """Write untrained networks with two folds and seeds, whose segmentations differ."""
    preprocessed = Path(space.environment["nnUNet_preprocessed"]) / space.dataset
    for configuration in configurations:
        for seed, fold in ((1, 0), (1, 1), (2, 0), (2, 1)):
            with pytest.MonkeyPatch.context() as patch:
                trainer = space.build(
                    f"{TRAINER}_seed{seed}", patch, fold=fold, configuration=configuration
                )
            torch.manual_seed(10 * seed + fold)
            for weight in trainer.network.parameters():
                if weight.ndim > 1:
                    weight.data.normal_()
            folder = Path(trainer.output_folder)
            trainer.save_checkpoint(str(folder / "checkpoint_final.pth"))
            for name, source in (("dataset.json", "dataset.json"), ("plans.json", f"{PLANS}.json")):
                shutil.copy(preprocessed / source, folder.parent / name)


@pytest.fixture(scope="module")
def models(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a workspace with models of a trainer, and a study of it."""
    space = workspace.with_results_in(tmp_path_factory.mktemp("ensemble"))
    preprocessed = Path(space.environment["nnUNet_preprocessed"])
    shutil.copytree(preprocessed, space.folder / "nnUNet_preprocessed")
    space.environment["nnUNet_preprocessed"] = str(space.folder / "nnUNet_preprocessed")
    file = space.folder / "nnUNet_preprocessed" / space.dataset / f"{PLANS}.json"
    plans = json.loads(file.read_text())
    plans["configurations"] |= {
        "3d_lowres": {"inherits_from": "3d_fullres", "next_stage": CASCADE},
        CASCADE: {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"},
    }
    file.write_text(json.dumps(plans))
    make_models(space, "3d_fullres", "3d_lowres", CASCADE)
    (space.folder / "mine.yaml").write_text(yaml.safe_dump(STUDY))
    return space


@pytest.fixture
def predict(models: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that predicts the unseen case to a folder, and returns what is said."""
    models.set_environment(monkeypatch)
    images = Path(models.environment["nnUNet_raw"]) / models.dataset / "imagesTs"

    def predict(*options: str, status: int = 0, images: Path = images) -> str:
        study = [] if "--trainers" in options else [str(models.folder / "mine.yaml")]
        given = ["-i", str(images), "-o", str(tmp_path / "out"), "--device", "cpu", *options]
        done = CliRunner().invoke(app, ["study", "predict", *study, *given])
        assert done.exit_code == status, done.output
        return done.output

    return predict


def labels(folder: Path) -> np.ndarray:
    return sitk.GetArrayFromImage(sitk.ReadImage(str(folder / f"{UNSEEN}.nii.gz")))


def nnunet_folders(space: Workspace, folds: str, seeds: str, *options: str) -> list[Path]:
    """Return the folders of nnU-Net's own predictions, one for each seed."""
    return [
        space.predict_here(f"{TRAINER}_seed{seed}", "--save_probabilities", "-f", *folds, *options)
        for seed in seeds
    ]


def average(folders: list[Path]) -> np.ndarray:
    found = [np.load(folder / f"{UNSEEN}.npz")["probabilities"] for folder in folders]
    return np.mean(found, axis=0).argmax(axis=0)


@pytest.mark.parametrize(("folds", "seeds"), [("01", "12"), ("0", "12"), ("01", "2")])
def test_prediction_averages_folds_and_seeds_as_nnunet(
    models: Workspace, predict: Callable, tmp_path: Path, folds: str, seeds: str
) -> None:
    options = ["--folds", f"{folds[0]}-{folds[-1]}", "--seeds", f"{seeds[0]}-{seeds[-1]}"]
    said = predict("--setting", "CPR", *options)
    for seed in seeds:
        assert f"{TRAINER}_seed{seed}__{PLANS}__3d_fullres: folds {', '.join(folds)}\n" in said
    theirs = nnunet_folders(models, folds, seeds)
    single = [labels(folder) for folder in theirs]
    assert all(len(np.unique(each)) > 1 for each in single)
    assert len(seeds) == 1 or (single[0] != single[1]).any()
    np.testing.assert_array_equal(labels(tmp_path / "out"), average(theirs))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "dataset.json", f"{UNSEEN}.nii.gz", "plans.json", "study_predict.json",
    ]  # fmt: skip
    if len(seeds) == 1:
        np.testing.assert_array_equal(labels(tmp_path / "out"), single[0])


def test_cascade_predicts_its_previous_stage_first(
    models: Workspace, predict: Callable, tmp_path: Path
) -> None:
    predict(
        "--trainers", TRAINER, "-d", "901", "-p", PLANS, "-c", CASCADE, "-f", "0,1", "--seeds", "1-2"
    )
    before = tmp_path / "out" / "previous_stage"
    stages = [replace(models, configuration=name) for name in ("3d_lowres", CASCADE)]
    np.testing.assert_array_equal(labels(before), average(nnunet_folders(stages[0], "01", "12")))
    theirs = nnunet_folders(stages[1], "01", "12", "-prev_stage_predictions", str(before))
    np.testing.assert_array_equal(labels(tmp_path / "out"), average(theirs))


def test_postprocessing_is_applied_if_all_seeds_agree(
    models: Workspace, predict: Callable, tmp_path: Path
) -> None:
    options = ["--setting", TRAINER, "--folds", "1-1"]
    predict(*options)
    plain = labels(tmp_path / "out")
    rules = ([keep_largest], [{"labels_or_regions": 2}])
    for seed in (1, 2):
        said = predict(*options)
        assert "no postprocessing" in said
        assert (f"-tr {TRAINER}_seed2 -p {PLANS}" in said) == (seed == 2), "that of the best model only"
        results = models.model(f"{TRAINER}_seed{seed}") / "crossval_results_folds_1"
        results.mkdir()
        (results / "postprocessing.pkl").write_bytes(pickle.dumps(rules))
    assert "predictions of other images or models" in predict(*options, status=1)
    shutil.rmtree(tmp_path / "out")
    assert "with nnU-Net's postprocessing in crossval_results_folds_1" in predict(*options)
    expected = keep_largest(plain, 2)
    assert (expected != plain).any()
    np.testing.assert_array_equal(labels(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--setting: expected one to predict with, got 2; choose from CPR; nnUNetTrainerSGD"),
        (["--setting", "SGD"], "--setting: expected one of the trainers, got 'SGD'; choose from CPR; "),
        (["--setting", "CPR", "-d", "A", "-d", "B"], "--dataset: expected one to predict with, got 2"),
        (["--setting", "CPR", "-c", "2d", "-c", "3d_fullres"], "choose from 2d; 3d_fullres"),
        (["--setting", "nnUNetTrainerSGD"], "4 of 4 runs are not trained: fold 0, seed 1; "),
        (["--setting", "CPR", "-f", "0-3"], "4 of 8 runs are not trained: fold 2, seed 1; "),
        (["--setting", "CPR", "-f", "0-3"], "study run mine, or predict with --folds 0,1"),
        (["--setting", "CPR", "--seeds", "2-3"], "study run mine, or predict with --seeds 2-2"),
    ],
)  # fmt: skip
def test_ambiguous_and_unfinished_settings_are_refused(
    predict: Callable, tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in predict(*options, status=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "expected images, DICOM in a folder each, got none"),
        (["a.mha", "a.nrrd"], "CASE_0000, or CASE, of each case, got a.mha, a.nrrd; rename"),
        (["a_0000.nii.gz", "a_0001.nii.gz"], "of each case, got a_0000.nii.gz, a_0001.nii.gz"),
        (["a.mha"], "a.mha cannot be read"),
        (["a_0000.nii.gz"], "a could not be predicted: Exception thrown in SimpleITK"),
    ],
)
def test_wrong_images_are_refused(
    predict: Callable, tmp_path: Path, names: list[str], message: str
) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_bytes(b"no image")
    said = predict("--setting", "CPR", status=1, images=tmp_path / "in")
    assert message in said and "Traceback" not in said


def test_images_of_other_formats_and_names_are_segmented_in_their_geometry(
    models: Workspace, predict: Callable, tmp_path: Path
) -> None:
    (unseen,) = (Path(models.environment["nnUNet_raw"]) / models.dataset / "imagesTs").iterdir()
    image = sitk.ReadImage(str(unseen))
    image.SetOrigin((10.0, -20.0, 30.0))
    image.SetDirection((0.0, 1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    (tmp_path / "in" / "patient 3").mkdir(parents=True)
    for name in ("a_0000.nii.gz", "scan 1.mha", "b_0007.nrrd", "patient 3/ct.mha"):
        sitk.WriteImage(image, str(tmp_path / "in" / name))
    (tmp_path / "in" / "notes.txt").touch()
    predict("--setting", "CPR", images=tmp_path / "in")
    found = sorted((tmp_path / "out").glob("*.nii.gz"))
    assert [path.name.removesuffix(".nii.gz") for path in found] == [
        "a",
        "b_0007",
        "patient 3",
        "scan 1",
    ]
    segmentations = [sitk.ReadImage(str(path)) for path in found]
    for each in segmentations:
        for about in ("Size", "Spacing", "Origin", "Direction"):
            got, expected = (getattr(one, f"Get{about}")() for one in (each, image))
            np.testing.assert_allclose(got, expected, atol=1e-6)
    one, *others = map(sitk.GetArrayFromImage, segmentations)
    assert len(np.unique(one)) > 1 and all((each == one).all() for each in others)


def test_color_images_are_one_file_or_one_a_channel(tmp_path: Path) -> None:
    """nnU-Net reads the colors of a PNG as channels, and grey ones as a channel each."""
    images, model = tmp_path / "images", tmp_path / "model"
    images.mkdir()
    model.mkdir()
    for name in ("a_0000.png", "b_0000.png", "b_0001.png", "b_0002.png"):
        sitk.WriteImage(sitk.Image(4, 4, sitk.sitkUInt8), str(images / name))
    about = {"file_ending": ".png", "channel_names": {"0": "R", "1": "G", "2": "B"}}
    (model / "dataset.json").write_text(json.dumps(about))
    (model / "plans.json").write_text('{"image_reader_writer": "NaturalImage2DIO"}')
    found = find_images(images, model)
    assert {case: len(files) for case, files in found.items()} == {"a": 1, "b": 3}
    (images / "d_0000.png").write_bytes(b"no image")
    with pytest.raises(Refusal, match=r"d_0000.png: expected an image, got a damaged file"):
        find_images(images, model)
    (images / "d_0000.png").unlink()
    sitk.WriteImage(sitk.Image(4, 4, sitk.sitkUInt8), str(images / "c_0000.mha"))
    with pytest.raises(Refusal, match=r"c_0000.mha: expected .png, as NaturalImage2DIO reads no other"):
        find_images(images, model)
    (model / "plans.json").write_text('{"image_reader_writer": "SimpleITKIO"}')
    with pytest.raises(Refusal, match=r"CASE_0002, or CASE_R and CASE_G and CASE_B, of each"):
        find_images(images, model)


@pytest.mark.parametrize(
    ("missing", "advice"),
    [([(1, 2), (1, 3)], "--folds 0-0"), ([(0, 2), (1, 2)], "--seeds 1,3"), ([(1, 1)], "--seeds 2,3")],
)
def test_advice_keeps_most_models(tmp_path: Path, missing: list[tuple[int, int]], advice: str) -> None:
    study = Study("mine", ["Dataset001_A"], ["nnUNetTrainerCPR"], folds=[0, 1], seeds=[1, 2, 3])
    for run in study.runs():
        folder = run.folder(tmp_path)
        folder.mkdir(parents=True)
        if (run.fold, run.seed) not in missing:
            with zipfile.ZipFile(folder / "checkpoint_final.pth", "w") as checkpoint:
                checkpoint.writestr("data.pkl", "")
    with pytest.raises(Refusal, match=f"or predict with {advice}$"):
        select_ensemble(study, tmp_path, None)


def test_other_files_in_the_output_are_refused(predict: Callable, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.nii.gz").touch()
    assert "expected a new or empty folder" in predict("--setting", "CPR", status=1)


@pytest.mark.slow
def test_killed_prediction_continues_with_the_next_case(models: Workspace, tmp_path: Path) -> None:
    images, output = tmp_path / "in", tmp_path / "out"
    images.mkdir()
    (unseen,) = (Path(models.environment["nnUNet_raw"]) / models.dataset / "imagesTs").iterdir()
    for case in "abcd":
        shutil.copy(unseen, images / f"{case}_0000.nii.gz")
    study = str(models.folder / "mine.yaml")
    given = ["study", "predict", study, "--setting", "CPR", "-i", str(images), "-o", str(output)]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *given, "--device", "cpu"], env=models.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    process = start()
    wait_for((output / "a.nii.gz").exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in output.glob("?.nii.gz")}
    assert 0 < len(done) < 4
    (output / f".d.nii.1@{os.uname().nodename}.tmp.gz.nii.gz").touch()  # of a kill while it writes
    out, _ = start().communicate(timeout=300)
    assert f"{len(done)} of 4 cases\n" in out and out.endswith(f"4 of 4 cases\nwrote {output}\n")
    assert done == {path: path.stat().st_mtime_ns for path in done}
    found = sorted(output.glob("*.nii.gz"))
    assert [path.name for path in found] == [f"{case}.nii.gz" for case in "abcd"]
    assert len({path.read_bytes() for path in found}) == 1


def test_replaced_image_is_refused_where_its_segmentation_exists(tmp_path: Path) -> None:
    """Others, such as those that a killed prediction left, are predicted as they are now."""
    model, images, output = (tmp_path / name for name in ("model", "images", "output"))
    for folder in (model, images):
        folder.mkdir()
    described = {"file_ending": ".nii.gz", "channel_names": {"0": "CT"}}
    (model / "dataset.json").write_text(json.dumps(described))
    (model / "plans.json").write_text("{}")
    (model / "fold_0").mkdir()
    (model / "fold_0" / "checkpoint_final.pth").touch()
    ensemble = prediction.Ensemble(("nnUNetTrainer",), (model,), (0,))

    def begin() -> tuple[int, int]:
        return next(prediction.predict(ensemble, images, output))

    for case in "ab":
        (images / f"{case}_0000.nii.gz").write_text("patient 1")
    assert begin() == (0, 2)
    (output / "a.nii.gz").touch()
    (images / "b_0000.nii.gz").write_text("patient 2, another image")
    assert begin() == (1, 2)
    (images / "a_0000.nii.gz").write_text("patient 3, another image")
    with pytest.raises(Refusal, match=r"a\.nii\.gz: the image of a has changed since .*; remove"):
        begin()
    (output / "a.nii.gz").unlink()
    assert begin() == (0, 2)


def test_replaced_slice_or_raw_file_is_another_image(tmp_path: Path) -> None:
    image = sitk.Image(4, 4, 2, sitk.sitkUInt8)
    sitk.WriteImage(image, str(tmp_path / "a.mhd"))
    (tmp_path / "series").mkdir()
    for name, file in (("a.mhd", "a.raw"), ("series", "series/1.dcm")):
        (tmp_path / file).write_bytes(bytes(32))
        before = prediction._size_and_time(tmp_path / name)
        (tmp_path / file).write_bytes(bytes(64))
        assert prediction._size_and_time(tmp_path / name) != before
