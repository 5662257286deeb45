"""The oldest and the newest Python, nnU-Net and torch, each in an environment of its own.

Each takes minutes and 7 GB of disk, which are given back at its end.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT
from tests.helpers.workspace import Workspace

TRAINER = "nnUNetTrainerCPR_ws3_4epochs_4iters_seed1"


def oldest_dependencies() -> list[str]:
    """Return the oldest allowed versions of the requirements."""
    required = map(Requirement, importlib.metadata.requires("nnunet-cpr") or [])
    return [
        f"{r.name}=={specifier.version}"
        for r in required
        if r.marker is None
        for specifier in r.specifier
    ]


def oldest_python() -> str:
    specifier = importlib.metadata.metadata("nnunet-cpr")["Requires-Python"]
    assert specifier is not None and specifier.startswith(">=")
    return specifier[len(">=") :]


KINDS = {
    "oldest": (oldest_python(), oldest_dependencies()),
    "newest": ("3.13", []),
}


def interpreter(version: str) -> str:
    """Return a Python of that version from the PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [f"python{version}", *sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is None:
            continue
        # pyenv puts commands on the PATH for versions that it does not have.
        code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([found, "-c", code], capture_output=True, text=True)
        if said.stdout.strip() == version:
            return found
    pytest.skip(f"there is no Python {version} here")


@dataclass
class Environment(Workspace):
    """Workspace with the commands of a virtual environment."""

    bin: Path = Path()

    def command(self, name: str, *arguments: str) -> list[str]:
        return [str(self.bin / name), *arguments]


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.release) for kind in KINDS])
def environment(
    request: pytest.FixtureRequest, workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    version, dependencies = KINDS[request.param]
    python = interpreter(version)
    folder = tmp_path_factory.mktemp(request.param)
    variables = {k: v for k, v in workspace.environment.items() if not k.startswith("PYTHON")}
    try:
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        made = Environment(folder, workspace.dataset, variables, bin=folder / "venv" / "bin")
        install = ["-m", "pip", "install", "--quiet", "--no-cache-dir", str(ROOT), *dependencies]
        subprocess.run(made.command("python", *install), env=variables, check=True)
        yield made
    finally:
        shutil.rmtree(folder)


def taken_over(begun: Workspace, by: Workspace, folder: Path) -> Workspace:
    """Copy the training for another environment."""
    shutil.copytree(begun.folder / "nnUNet_results", folder / "nnUNet_results")
    return by.with_results_in(folder)


def check_continued(begun: Workspace, continued: Workspace) -> None:
    """Check that epochs, bounds and step count were continued."""
    start = begun.checkpoint(TRAINER, "checkpoint_best.pth")["current_epoch"]
    assert start >= 1
    before, after = begun.history(TRAINER), continued.history(TRAINER)
    before = before[before["epoch"] < start]
    matrices = before["parameter"].nunique()
    assert after["step"].tolist() == list(np.repeat([4, 8, 12, 16], matrices))
    assert after[: len(before)].equals(before)
    bounds = before["kappa"][:matrices]  # set at step 3
    assert np.isfinite(bounds).all()
    np.testing.assert_array_equal(after["kappa"], np.tile(bounds, 4))
    cpr = continued.checkpoint(TRAINER)["optimizer_state"]["cpr"]
    assert int(cpr["state"]["step"]) == 16
    assert (continued.fold(TRAINER) / "validation" / "summary.json").exists()


def test_killed_training_is_continued_and_predicts(environment: Environment, tmp_path: Path) -> None:
    """A killed training is continued in its environment and in this one."""
    own = environment.with_results_in(tmp_path)
    own.train_and_kill(TRAINER, "Epoch 2")
    killed = taken_over(own, own, tmp_path / "killed")
    here = Workspace(own.folder, own.dataset, own.environment)
    carried = taken_over(own, here, tmp_path / "here")

    own.train(TRAINER, "--c")
    check_continued(killed, own)
    carried.train(TRAINER, "--c")
    check_continued(killed, carried)

    images = Path(own.environment["nnUNet_raw"]) / own.dataset / "imagesTs"
    output = tmp_path / "predictions"
    own.run(
        "nnUNetv2_predict_from_modelfolder", "-i", str(images), "-o", str(output), "-f", "0",
        "-m", str(own.model(TRAINER)), "-device", "cpu", "-npp", "1", "-nps", "1",
    )  # fmt: skip
    assert [path.name for path in output.glob("*.nii.gz")] == ["phantom_005.nii.gz"]
