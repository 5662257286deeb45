"""Export of models for nnU-Net without this package."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.names import WrongName
from nnunet_cpr.nnunet.run_record import read_record
from nnunet_cpr.nnunet.tools.export import export_model
from nnunet_cpr.refusals import Refusal
from tests.helpers.workspace import PLANS, Workspace

CPR = "nnUNetTrainerCPR_ws1_seed2"
FINAL, BEST = ["checkpoint_final.pth"], "checkpoint_best.pth"
COPY = f"nnUNetTrainer__{PLANS}__3d_fullres"

WITHOUT_PACKAGE = """
import os, sys

os.environ.pop("nnUNet_extTrainer", None)
sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "__name__", "") != "_BeforeSearch"]


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


@pytest.fixture(scope="module")
def trained(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with two folds and cross-validation results."""
    space = workspace.with_results_in(tmp_path_factory.mktemp("trained"))
    first, second = space.finish(CPR), space.model(CPR) / "fold_1"
    (first / "validation").mkdir()
    summary = {"foreground_mean": {"Dice": 0.85123}}
    (first / "validation" / "summary.json").write_text(json.dumps(summary))
    shutil.copytree(first, second)
    checkpoint = torch.load(second / "checkpoint_final.pth", weights_only=False)
    for weight in checkpoint["network_weights"].values():
        weight.mul_(0.9)
    torch.save(checkpoint, second / "checkpoint_final.pth")
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

    def refused(
        *folds: str,
        output: Path = tmp_path / "exported",
        names: list[str] = FINAL,
        model: Path = model,
    ) -> str:
        before = contents(tmp_path)
        with pytest.raises((Refusal, WrongName)) as error:
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
             ("checkpoint_final.pth", "progress.png", "validation/summary.json",
              "nnunet_cpr_run.json")]  # fmt: skip
    after = contents(copy)
    assert set(after) == {
        "plans.json", "dataset.json", "dataset_fingerprint.json", "model_card.md", *folds,
        "crossval_results_folds_0_1/postprocessing.pkl",
    }  # fmt: skip
    new = {"model_card.md", *(f"fold_{i}/checkpoint_final.pth" for i in (0, 1))}
    card = (copy / "model_card.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["license"] is None  # left to the user
    length = "| length | 1,000 epochs of 250 iterations, 250,000 steps |"  # of the name
    for line in ("# Dataset901_Phantoms, 3d_fullres", f"- Trainer: {CPR}", length):
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


def test_card_has_the_dice_of_the_exported_checkpoint_only(model: Path, tmp_path: Path) -> None:
    """nnU-Net validates the final checkpoint, with --val_best the best one."""
    record = read_record(model / "fold_1")
    record.changed(model / "fold_1", validated={"checkpoint": "checkpoint_best.pth", "epochs": 1})
    for name, dice in [(FINAL[0], ["85.12", "not validated"]), (BEST, ["not validated", "85.12"])]:
        copy = export_model(model, tmp_path / name, None, [name])
        card = (copy / "model_card.md").read_text()
        assert f"as nnU-Net computed it with `{name}`" in card
        assert re.findall(r"^\| fold_\d \| ([^|]+) \|", card, re.M) == dice


def test_trainers_of_others_and_with_another_network_are_refused(
    model: Path, tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "mine.py").write_text(
        "from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR\n\n\n"
        "class nnUNetTrainerExported(nnUNetTrainerCPR):\n"
        "    def build_network_architecture(*args, **kwargs): ...\n"
    )
    monkeypatch.setenv("nnUNet_extTrainer", str(tmp_path / "trainers"))
    for name, reason in (
        ("nnUNetTrainerExported", "of the model builds its own network"),
        ("nnUNetTrainer_5epochs", "of the model is not from nnunet-cpr"),
        ("nnUNetTrainerLost", "not found by nnU-Net"),
    ):
        model = model.rename(model.with_name(f"{name}__{PLANS}__3d_fullres"))
        assert f"trainer {name} {reason}" in refused(model=model)


def test_truncated_checkpoint_is_refused(model: Path, refused) -> None:
    torn = model / "fold_1" / FINAL[0]
    os.truncate(torn, 1000)
    assert refused() == f"{torn} is damaged: File is not a zip file"


def test_missing_files_are_named(model: Path, refused) -> None:
    assert f"{model / 'fold_3' / FINAL[0]} does not exist; choose existing folds" in refused("0", "3")
    assert "does not exist" in refused(names=["../fold_0/checkpoint_final.pth"])


def test_unsafe_outputs_are_refused(model: Path, tmp_path: Path, refused) -> None:
    assert "would look like a model trained without CPR" in refused(output=tmp_path / "results")
    (tmp_path / "there" / "Dataset901_Phantoms" / COPY).mkdir(parents=True)
    assert f"{COPY} exists; move it away" in refused(output=tmp_path / "there")


def test_command_prints_how_to_predict(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    for name in ("cpr_history.csv", "validation/summary.json"):  # records, which no prediction needs
        (model / "fold_1" / name).write_text("{")
    options = ["--folds", "1-1", "--checkpoint", "checkpoint_best.pth"]
    arguments = ["export", str(model), str(output), *options]
    done = CliRunner().invoke(app, arguments)
    copy = output / "Dataset901_Phantoms" / COPY
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{copy}: exported. Predict with it:")
    assert "| fold_1 | not validated | not recorded |" in (copy / "model_card.md").read_text()
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
    variables = {"PYTHONPATH": str(tmp_path / "blocked"), "nnUNet_results": str(exported)}
    plain = Workspace(tmp_path, workspace.dataset, {**workspace.environment, **variables})
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

    case = "phantom_005"
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
        name: digest
        for name, (digest, _) in contents(copy).items()
        if Path(name).name not in ("model_card.md", "nnunet_cpr_run.json")
    }  # nnU-Net's archive has its own files only
