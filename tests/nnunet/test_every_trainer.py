"""The functions of nnU-Net's commands with every other trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnunet_cpr.nnunet.tools.export import export_model
from tests.helpers import ROOT
from tests.helpers.nnunet_trainers import (
    NNUNET,
    NOT_TO_COMBINE,
    OTHER_PROJECTS,
    make_small,
    name_on,
)
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
def search(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return ``nnUNet_extTrainer`` with a folder of the trainers of other projects."""
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "other_projects.py").write_text(OTHER_PROJECTS)
    return os.pathsep.join([str(folder), str(ROOT / "trainers")])


def _others() -> Iterator[Any]:
    """Yield all trainers; a few of nnU-Net's own belong to the slow stage."""
    few = ("nnUNetTrainerAdam", "nnUNetTrainerDA5", "nnUNetTrainerNoDeepSupervision")
    for other in sorted(set(NNUNET) - NOT_TO_COMBINE - NEED_A_GPU):
        yield pytest.param(other, marks=pytest.mark.slow if other in few else pytest.mark.release)
    for name in (*OTHERS, *FAMILIES):
        yield pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("other", list(_others()))  # 6 seconds each
def test_training_is_stopped_continued_predicts_and_is_exported(
    other: str,
    workspace: Workspace,
    search: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An exception stops it; test_kills.py kills the process."""
    settings = "_ws3_ema0p5_3epochs_2iters_seed1"
    if other in FAMILIES:
        name, other = f"{other}_3epochs_2iters_seed1", "nnUNetTrainer"
    else:
        name = name_on(other, settings) if other in NNUNET else f"{OTHERS[other]}{settings}_on_{other}"
    make_small(monkeypatch)
    space = workspace.with_results_in(tmp_path)
    space.environment["nnUNet_extTrainer"] = search

    space.begin_here(name, epoch=1)
    capsys.readouterr()
    space.train_here(name, "--c")
    said = capsys.readouterr().out
    assert f"Training as {other} with" in said and "Epoch 0" not in said
    if "CPR" in name:
        history = space.history(name)
        assert history["epoch"].unique().tolist() == [0, 1, 2]
        assert other == "nnUNetTrainer" or (history["kappa"] < 1e9).iloc[-1]
    assert space.checkpoint(name)["trainer_name"] == name

    space.predict_here(name, "--disable_tta")
    space.set_environment(monkeypatch)
    exported = export_model(space.model(name), tmp_path / "exported", None, ["checkpoint_final.pth"])
    assert exported.name == f"{other}__{PLANS}__3d_fullres"
