"""nnU-Net's commands with comparison methods and warm starts as shares, killed and continued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.command_server import CommandServer
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import PLANS, Workspace

LENGTH = "_3epochs_2iters_seed1"
NAMES = [
    "nnUNetTrainerSGD_corrected_wd1",
    "nnUNetTrainerAdamW_cautious_wd1_warmup2",
    "nnUNetTrainerSGD_independent_wd0p01",
    "nnUNetTrainerSGD_norm0p9_wd1",
    "nnUNetTrainerSGD_normws3_wd1",
    "nnUNetTrainerSGD_hyperball",
    "nnUNetTrainerCPR_ws50p",
]


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    started = CommandServer("tests.helpers.nnunet_trainers:make_small")
    yield started
    started.close()


@pytest.mark.slow  # 10 seconds each
@pytest.mark.parametrize("method", NAMES)
def test_killed_training_ends_like_an_uninterrupted_one(
    method: str, workspace: Workspace, server: CommandServer, tmp_path: Path
) -> None:
    name, log = method + LENGTH, tmp_path / "output.txt"
    whole, parts = (workspace.with_results_in(tmp_path / folder) for folder in ("whole", "parts"))
    for space in (whole, parts):
        space.environment |= {
            "nnUNet_extTrainer": str(ROOT / "trainers"),
            "NNUNET_CPR_SAVE_MINUTES": "0",
        }
    environment = parts.environment
    train = ["nnUNetv2_train", *parts.train_arguments(name)]
    assert server.run(train, whole.environment, log) == 0, log.read_text()[-3000:]

    server.run_and_kill(train, environment, log, "Epoch 2")
    assert not (parts.fold(name) / "checkpoint_final.pth").exists()
    assert server.run([*train, "--c"], environment, log) == 0, log.read_text()[-3000:]
    assert "Epoch 0" not in log.read_text()
    ends = [space.checkpoint(name) for space in (whole, parts)]
    for key in ("network_weights", "optimizer_state"):
        assert not differences(ends[0][key], ends[1][key])
    key = "cpr" if "CPR" in method else "baseline"
    assert int(ends[1]["optimizer_state"][key]["state"]["step"]) == 6
    assert all(p.isfinite().all() for p in ends[1]["network_weights"].values() if torch.is_tensor(p))

    images = workspace.folder / "nnUNet_raw" / workspace.dataset / "imagesTs"
    predict = ["nnUNetv2_predict", "-i", str(images), "-o", str(tmp_path / "out"), "--disable_tta"]
    model = ["-d", "901", "-c", "3d_fullres", "-f", "0", "-tr", name, "-p", PLANS, "-device", "cpu"]
    assert server.run([*predict, *model, "-npp", "0", "-nps", "0"], environment, log) == 0
    assert list((tmp_path / "out").glob("*.nii.gz"))
