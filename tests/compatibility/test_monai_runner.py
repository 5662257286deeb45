"""MONAI's nnUNetV2Runner with CPR, compared with nnU-Net's own command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import SimpleITK
import torch

from nnunet_cpr.datasets import phantom
from nnunet_cpr.nnunet.commands import nnunet_environment
from tests.helpers import ROOT
from tests.helpers.client_training import assert_regularized, assert_same

pytest.importorskip("monai")

pytestmark = pytest.mark.release

TRAINER = "nnUNetTrainerCPR_ws2_1epochs_4iters_seed1"
PIPELINE = ROOT / "tests" / "compatibility" / "monai_pipeline.py"
CASES = 5


def nnunet_command(name: str) -> str:
    search = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    program = shutil.which(name, path=search)
    assert program is not None, f"{name} is not installed"
    return program


def write_cpu_command(folder: Path) -> None:
    """Write an ``nnUNetv2_train`` that adds ``-device cpu``, which the runner cannot pass on."""
    command = folder / "nnUNetv2_train"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(nnunet_command("nnUNetv2_train"))} "$@" -device cpu\n'
    )
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


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_monai_runner_trains_like_nnunet(tmp_path: Path) -> None:
    write_data_list(tmp_path)
    write_cpu_command(tmp_path / "bin")
    environment = nnunet_environment(tmp_path, processes=1)
    environment.pop("nnUNet_extTrainer", None)  # the runner's processes find the trainers alone
    environment |= {
        "nnUNet_compile": "f",
        "OMP_NUM_THREADS": "1",  # as the runner sets it
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}",
    }
    run([sys.executable, str(PIPELINE), str(tmp_path), TRAINER], environment)

    dataset = tmp_path / "nnUNet_raw" / "Dataset007_phantoms"
    assert len(list((dataset / "imagesTr").iterdir())) == CASES
    fold = Path(dataset.name, f"{TRAINER}__nnUNetPlans__3d_fullres", "fold_0")
    by_monai = tmp_path / "nnUNet_results" / fold
    history = pd.read_csv(by_monai / "cpr_history.csv")
    assert set(history["step"]) == {4}
    validations = [tmp_path / "validation_after_training", by_monai / "validation"]
    first, second = (json.loads((v / "summary.json").read_text())["mean"] for v in validations)
    assert first == second

    environment |= {"nnUNet_results": str(tmp_path / "by_nnunet"), "nnUNet_n_proc_DA": "0"}
    run(
        [nnunet_command("nnUNetv2_train"), "7", "3d_fullres", "0", "-tr", TRAINER, "-device", "cpu"],
        environment,
    )
    found, expected = (
        torch.load(f / "checkpoint_final.pth", weights_only=False)
        for f in (by_monai, tmp_path / "by_nnunet" / fold)
    )
    assert found["trainer_name"] == TRAINER
    for key in ("network_weights", "optimizer_state"):
        assert_same(found[key], expected[key], key)
    assert_regularized(found["optimizer_state"], steps=4)

    raw = str(dataset / "imagesTs")
    model = ["-d", "7", "-c", "3d_fullres", "-f", "0", "-tr", TRAINER, "-device", "cpu"]
    output = ["-i", raw, "-o", str(tmp_path / "predicted_by_nnunet"), "-npp", "1", "-nps", "1"]
    run([nnunet_command("nnUNetv2_predict"), *output, *model], environment)
    name = f"case_{CASES}.nii.gz"
    by_monai, by_nnunet = (
        SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(tmp_path / f"predicted_by_{who}" / name))
        for who in ("monai", "nnunet")
    )
    assert np.array_equal(by_monai, by_nnunet)
