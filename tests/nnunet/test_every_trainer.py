"""nnU-Net's commands with every other trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnunet_cpr.nnunet.tools.export import export_model
from tests.helpers import ROOT
from tests.helpers.command_server import CommandServer
from tests.helpers.nnunet_trainers import NNUNET, NOT_TO_COMBINE, OTHER_PROJECTS, name_on
from tests.helpers.workspace import PLANS, Workspace

NEED_A_GPU = {name for name in NNUNET if name.startswith("nnUNetTrainerBenchmark")}
"""Benchmarks of speed that refuse a CPU and write no checkpoint."""
FAMILIES = [
    "nnUNetTrainerMuonCPR_warmup2",
    "nnUNetTrainerMuon_wd1en2_warmup2",
    "nnUNetTrainerAMOS_warmup2",
    "nnUNetTrainerSGD_corrected_wd1",
    "nnUNetTrainerAdamW_cautious_wd1_warmup2",
    "nnUNetTrainerSGD_normws3_wd1",
    "nnUNetTrainerSGD_hyperball",
]
OTHERS = {
    "nnUNetTrainerMedNeXtLike": "nnUNetTrainerAttachCPR",
    "nnUNetTrainerUMambaLike": "nnUNetTrainerCPR",
    "nnUNetTrainerStages": "nnUNetTrainerAttachCPR",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the trainers of other projects."""
    made = tmp_path_factory.mktemp("trainers")
    (made / "other_projects.py").write_text(OTHER_PROJECTS)
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    started = CommandServer("tests.helpers.nnunet_trainers:make_small")
    yield started
    started.close()


def _others() -> Iterator[Any]:
    """Yield all trainers; a few of nnU-Net's own belong to the slow stage."""
    few = ("nnUNetTrainerAdam", "nnUNetTrainerDA5", "nnUNetTrainerNoDeepSupervision")
    for other in sorted(set(NNUNET) - NOT_TO_COMBINE - NEED_A_GPU):
        yield pytest.param(other, marks=pytest.mark.slow if other in few else pytest.mark.release)
    for name in (*OTHERS, *FAMILIES):
        yield pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("other", list(_others()))  # 6 seconds each
def test_training_is_killed_continued_predicts_and_is_exported(
    other: str,
    workspace: Workspace,
    folder: Path,
    server: CommandServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = "_ws3_3epochs_2iters_seed1"
    if other in FAMILIES:
        name, other = f"{other}_3epochs_2iters_seed1", "nnUNetTrainer"
    else:
        name = name_on(other, settings) if other in NNUNET else f"{OTHERS[other]}{settings}_on_{other}"
    space = workspace.with_results_in(tmp_path)
    search = os.pathsep.join([str(folder), str(ROOT / "trainers")])
    environment = {**space.environment, "nnUNet_extTrainer": search}
    train = ["nnUNetv2_train", *space.train_arguments(name)]
    log = tmp_path / "output.txt"

    server.run_and_kill(train, environment, log, "Epoch 1")
    assert not (space.fold(name) / "checkpoint_final.pth").exists()
    assert server.run([*train, "--c"], environment, log) == 0, log.read_text()[-3000:]
    said = log.read_text()
    assert f"Training as {other} with" in said and "Epoch 0" not in said
    if "CPR" in name:
        history = space.history(name)
        assert history["epoch"].unique().tolist() == [0, 1, 2]
        assert other == "nnUNetTrainer" or (history["kappa"] < 1e9).iloc[-1]
    assert space.checkpoint(name)["trainer_name"] == name

    predict = ["nnUNetv2_predict", "-i", str(space_images(workspace)), "-o", str(tmp_path / "out")]
    model = ["-d", "901", "-c", "3d_fullres", "-f", "0", "-tr", name, "-p", PLANS, "-device", "cpu"]
    options = ["-npp", "0", "-nps", "0", "--disable_tta"]
    assert server.run([*predict, *model, *options], environment, log) == 0, log.read_text()[-3000:]
    assert list((tmp_path / "out").glob("*.nii.gz"))

    if "Primus" not in other:  # whose network is smaller in the commands' processes than in this one
        monkeypatch.setenv("nnUNet_extTrainer", search)
        exported = export_model(space.model(name), tmp_path / "exported", None, ["checkpoint_final.pth"])
        assert exported.name == f"{other}__{PLANS}__3d_fullres"


def space_images(workspace: Workspace) -> Path:
    return workspace.folder / "nnUNet_raw" / workspace.dataset / "imagesTs"
