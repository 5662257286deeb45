"""MONAI's nnUNetV2Runner with CPR."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pandas as pd
import pytest
import torch

from nnunet_cpr.datasets import phantom
from nnunet_cpr.nnunet.commands import nnunet_environment
from tests.helpers import ROOT
from tests.helpers.resume_cases import assert_regularized

pytest.importorskip("monai")

pytestmark = pytest.mark.release

TRAINER = "nnUNetTrainerCPR_ws2_1epochs_4iters_seed1"
PIPELINE = ROOT / "tests" / "compatibility" / "monai_pipeline.py"
CASES = 5


def write_cpu_command(folder: Path) -> None:
    """Write an ``nnUNetv2_train`` that adds ``-device cpu``, which the runner cannot pass on."""
    search = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    program = shutil.which("nnUNetv2_train", path=search)
    assert program is not None, "nnUNetv2_train is not installed"
    command = folder / "nnUNetv2_train"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(program)} "$@" -device cpu\n')
    command.chmod(0o755)


def write_data_list(folder: Path) -> None:
    """Write phantoms under names that nnU-Net rejects, with MONAI's list of them."""
    phantom.write_dataset(folder / "made", training_cases=CASES)
    (folder / "phantoms").mkdir()
    entries: dict[str, list[dict[str, str]]] = {}
    for key, part in (("training", "Tr"), ("testing", "Ts")):
        entries[key] = []
        for label in sorted((folder / "made" / f"labels{part}").iterdir()):
            name = label.name.removesuffix(".nii.gz")
            entry = {"image": f"{name}_mri.nii.gz", "label": f"{name}_truth.nii.gz"}
            image = folder / "made" / f"images{part}" / f"{name}_0000.nii.gz"
            shutil.move(image, folder / "phantoms" / entry["image"])
            shutil.move(label, folder / "phantoms" / entry["label"])
            entries[key].append(entry)
    (folder / "datalist.json").write_text(json.dumps(entries))


def test_monai_runner_trains_validates_and_predicts(tmp_path: Path) -> None:
    write_data_list(tmp_path)
    write_cpu_command(tmp_path / "bin")
    environment = nnunet_environment(tmp_path, processes=1)
    environment.pop("nnUNet_extTrainer", None)  # the runner's processes find the trainers alone
    environment |= {
        "nnUNet_compile": "f",
        "OMP_NUM_THREADS": "1",  # as the runner sets it
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}",
    }
    command = [sys.executable, str(PIPELINE), str(tmp_path), TRAINER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    dataset = tmp_path / "nnUNet_raw" / "Dataset007_phantoms"
    assert len(list((dataset / "imagesTr").iterdir())) == CASES
    fold = Path(dataset.name, f"{TRAINER}__nnUNetPlans__3d_fullres", "fold_0")
    by_monai = tmp_path / "nnUNet_results" / fold
    history = pd.read_csv(by_monai / "cpr_history.csv")
    assert set(history["step"]) == {4}
    validations = [tmp_path / "validation_after_training", by_monai / "validation"]
    first, second = (json.loads((v / "summary.json").read_text())["mean"] for v in validations)
    assert first == second

    found = torch.load(by_monai / "checkpoint_final.pth", weights_only=False)
    assert found["trainer_name"] == TRAINER
    assert_regularized(found["optimizer_state"], steps=4)
    assert (tmp_path / "predicted_by_monai" / f"case_{CASES}.nii.gz").exists()
