"""Export of models for nnU-Net without this package."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
import torch
import yaml
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.nnunet.checkpoints import UnusableCheckpoint
from nnunet_cpr.nnunet.tools.export import ExportError, export_model
from tests.helpers.workspace import PLANS, Workspace

CPR = "nnUNetTrainerCPR_ws1_seed2"
FINAL = ["checkpoint_final.pth"]
COPY = f"nnUNetTrainer__{PLANS}__3d_fullres"

WITHOUT_PACKAGE = """
import os, sys

os.environ.pop("nnUNet_extTrainer", None)


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("nnunet_cpr"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
for name in [name for name in sys.modules if name.startswith("nnunet_cpr")]:
    del sys.modules[name]
"""


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file.relative_to(folder)): (
            hashlib.sha256(file.read_bytes()).hexdigest(),
            file.stat().st_mtime_ns,
        )
        for file in folder.rglob("*")
        if file.is_file()
    }


def change(path: Path, how: Callable[[dict], object]) -> None:
    checkpoint = torch.load(path, weights_only=False)
    how(checkpoint)
    torch.save(checkpoint, path)


@pytest.fixture(scope="module")
def trained(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with two folds and cross-validation results."""
    space = workspace.with_results_in(tmp_path_factory.mktemp("trained"))
    first, second = space.finish(CPR), space.model(CPR) / "fold_1"
    (first / "validation").mkdir()
    summary = {"foreground_mean": {"Dice": 0.85123}}
    (first / "validation" / "summary.json").write_text(json.dumps(summary))
    shutil.copytree(first, second)
    change(
        second / "checkpoint_final.pth",
        lambda checkpoint: [weight.mul_(0.9) for weight in checkpoint["network_weights"].values()],
    )
    for folds in ("0_1", "0_1_2"):
        results = space.model(CPR) / f"crossval_results_folds_{folds}"
        results.mkdir()
        (results / "postprocessing.pkl").write_bytes(b"the user's own")
    return space.model(CPR)


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """Copy the model, so that it can be changed."""
    return Path(shutil.copytree(trained, tmp_path / "results" / "Dataset901_Phantoms" / trained.name))


@pytest.fixture
def refused(model: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a function that checks a refusal without written files and returns its message."""

    def refused(*folds: str, output: Path = tmp_path / "exported", names: list[str] = FINAL) -> str:
        before = contents(tmp_path)
        with pytest.raises((ExportError, UnusableCheckpoint, OSError)) as error:
            export_model(model, output, list(folds) or None, names)
        assert contents(tmp_path) == before
        assert "\n" not in str(error.value)
        return str(error.value)

    return refused


def test_export_contains_only_what_nnunet_needs(model: Path, tmp_path: Path) -> None:
    before = contents(model)
    copy = export_model(model, tmp_path / "exported", None, FINAL)
    assert contents(model) == before
    assert copy == tmp_path / "exported" / "Dataset901_Phantoms" / COPY
    folds = [f"fold_{i}/{name}" for i in (0, 1) for name in
             ("checkpoint_final.pth", "progress.png", "validation/summary.json")]  # fmt: skip
    after = contents(copy)
    assert set(after) == {
        "plans.json", "dataset.json", "dataset_fingerprint.json", "model_card.md", *folds,
        "crossval_results_folds_0_1/postprocessing.pkl",
    }  # fmt: skip
    new = {"model_card.md", *(f"fold_{i}/checkpoint_final.pth" for i in (0, 1))}
    card = (copy / "model_card.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["license"] is None  # left to the user
    for line in ("# Dataset901_Phantoms, 3d_fullres", f"- Trainer: {CPR}"):
        assert line in card.splitlines()
    assert f"-m {COPY} -f 0 1 -i IMAGES" in card
    assert re.search(r"^\| fold_0 \| 85.12 \| [\w ]+: .+ \|$", card, re.M)
    for name in set(after) - new:
        assert after[name][0] == before[name][0]
    for fold in ("fold_0", "fold_1"):
        # Whoever gets it can read it without trusting it.
        ours = torch.load(copy / fold / "checkpoint_final.pth", weights_only=True)
        theirs = torch.load(model / fold / "checkpoint_final.pth", weights_only=False)
        assert ours.keys() == {
            "network_weights", "init_args", "inference_allowed_mirroring_axes", "trainer_name",
            "trained_by",
        }  # fmt: skip
        assert (ours["trainer_name"], ours["trained_by"]) == ("nnUNetTrainer", CPR)
        assert ours["inference_allowed_mirroring_axes"] == (0, 1, 2)
        assert ours["init_args"] == theirs["init_args"]
        for key, weight in theirs["network_weights"].items():
            assert torch.equal(ours["network_weights"][key], weight)


def test_models_of_other_trainers_are_refused(model: Path, refused) -> None:
    change(model / "fold_0" / FINAL[0], lambda c: c.update(trainer_name="nnUNetTrainer_5epochs"))
    assert "trainer nnUNetTrainer_5epochs of the model is not from nnunet-cpr" in refused()
    change(model / "fold_0" / FINAL[0], lambda c: c.update(trainer_name="nnUNetTrainerLost"))
    assert "trainer nnUNetTrainerLost not found by nnU-Net" in refused()


@pytest.mark.parametrize("changed", [True, False])
def test_trainers_with_another_network_are_refused(
    model: Path, tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    (tmp_path / "trainers").mkdir()
    name = f"nnUNetTrainerExported{changed}"  # nnU-Net imports a module of a name once
    code = (
        "from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR\n\n\n"
        f"class {name}(nnUNetTrainerCPR):\n"
        f"    def {'build_network_architecture' if changed else 'mine'}(*args, **kwargs): ...\n"
    )
    (tmp_path / "trainers" / f"mine_{changed}.py".lower()).write_text(code)
    monkeypatch.setenv("nnUNet_extTrainer", str(tmp_path / "trainers"))
    for fold in ("fold_0", "fold_1"):
        change(model / fold / FINAL[0], lambda c: c.update(trainer_name=name))
    if changed:
        assert f"trainer {name} of the model builds its own network" in refused()
    else:
        assert export_model(model, tmp_path / "exported", None, FINAL).is_dir()


def test_truncated_checkpoint_is_refused(model: Path, refused) -> None:
    torn = model / "fold_1" / FINAL[0]
    os.truncate(torn, 1000)
    assert refused() == f"{torn} is damaged or cannot be read: File is not a zip file"


def test_missing_files_are_named(model: Path, refused) -> None:
    assert f"{model / 'fold_3' / FINAL[0]} does not exist; choose existing folds" in refused("0", "3")
    assert "checkpoint_latest.pth does not exist" in refused(names=["checkpoint_latest.pth"])
    assert "does not exist" in refused(names=["../fold_0/checkpoint_final.pth"])
    assert "does not exist" in refused("../fold_0")
    (model / "dataset.json").write_text("{")
    assert refused().startswith(f"{model / 'dataset.json'} cannot be read: ")
    (model / "plans.json").unlink()
    assert f"No such file or directory: '{model / 'plans.json'}'" in refused()


@pytest.mark.parametrize("name", ["../../elsewhere", "..", None])
def test_names_in_the_plans_stay_within_the_output(model: Path, refused, name: object) -> None:
    plans = json.loads((model / "plans.json").read_text())
    (model / "plans.json").write_text(json.dumps({**plans, "dataset_name": name}))
    assert f"expected a name valid for a folder, got {name!r}" in refused()


def test_unsafe_outputs_are_refused(model: Path, tmp_path: Path, refused) -> None:
    assert "would look like a model trained without CPR" in refused(output=tmp_path / "results")
    (tmp_path / "there" / "Dataset901_Phantoms" / COPY).mkdir(parents=True)
    assert f"{COPY} exists; move it away" in refused(output=tmp_path / "there")
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refused(output=tmp_path / "file")


def test_failed_write_leaves_nothing(model: Path, refused) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        said = refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in said and "checkpoint_final.pth" in said


def test_command_prints_how_to_predict(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    arguments = [
        "export",
        str(model),
        str(output),
        "--folds",
        "1",
        "--checkpoint",
        "checkpoint_best.pth",
    ]
    done = CliRunner().invoke(app, arguments)
    copy = output / "Dataset901_Phantoms" / COPY
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{copy}: fold_1, ")
    assert f"nnUNetv2_predict_from_modelfolder -m {copy} -f 1 -chk checkpoint_best.pth -i" in done.stdout
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert again.stderr == f"nnunet-cpr: {copy} exists; move it away or choose another folder\n"


@pytest.mark.slow  # a minute
def test_exported_model_predicts_the_same_without_package(
    workspace: Workspace, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(WITHOUT_PACKAGE)
    exported = tmp_path / "exported"
    plain = Workspace(
        tmp_path,
        workspace.dataset,
        {
            **workspace.environment,
            "PYTHONPATH": str(tmp_path / "blocked"),
            "nnUNet_results": str(exported),
        },
    )
    absent = subprocess.run(
        [sys.executable, "-c", "import nnunet_cpr"],
        env=plain.environment,
        capture_output=True,
        text=True,
    )
    assert "No module named 'nnunet_cpr'" in absent.stderr

    before = contents(model)
    workspace.run("nnunet-cpr", "export", str(model), str(exported))
    copy = exported / workspace.dataset / COPY
    images = workspace.folder / "nnUNet_raw" / workspace.dataset / "imagesTs"

    def predict(space: Workspace, folder: Path, output: str, **options: bool):
        return space.run(
            "nnUNetv2_predict_from_modelfolder", "-i", str(images), "-o", str(tmp_path / output),
            "-m", str(folder), "-f", "0", "1", "-device", "cpu", "-npp", "1", "-nps", "1",
            "--save_probabilities", **options,
        )  # fmt: skip

    failed = predict(plain, model, "failed", check=False)
    assert failed.returncode != 0
    assert f"Could not find requested nnunet trainer {CPR}" in failed.stderr
    predict(workspace, model, "ours")
    predict(plain, copy, "theirs")
    assert contents(model) == before

    case = "phantom_005"
    ours, theirs = (
        SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(tmp_path / folder / f"{case}.nii.gz"))
        for folder in ("ours", "theirs")
    )
    assert ours.shape == theirs.shape and np.array_equal(ours, theirs)
    ours, theirs = (
        np.load(tmp_path / folder / f"{case}.npz")["probabilities"] for folder in ("ours", "theirs")
    )
    assert np.array_equal(ours, theirs) and len(np.unique(ours)) > 1000

    # nnU-Net's own way of sharing models takes it from there.
    archive = tmp_path / "model.zip"
    plain.run(
        "nnUNetv2_export_model_to_zip", "-d", "901", "-o", str(archive), "-c", "3d_fullres",
        "-p", PLANS, "-f", "0", "1",
    )  # fmt: skip
    installed = plain.with_results_in(tmp_path / "installed")
    (tmp_path / "installed" / "nnUNet_results").mkdir(parents=True)
    installed.run("nnUNetv2_install_pretrained_model_from_zip", str(archive))
    there = contents(tmp_path / "installed" / "nnUNet_results" / workspace.dataset / COPY)
    assert {name: digest for name, (digest, _) in there.items()} == {
        name: digest for name, (digest, _) in contents(copy).items() if name != "model_card.md"
    }  # nnU-Net's archive has its own files only
