"""Trainings that begin with pretrained weights: their own folder, record and refusals."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from nnunetv2.run.run_training import maybe_load_checkpoint

from nnunet_cpr.nnunet.fold_files import PRETRAINED
from nnunet_cpr.nnunet.parts.weights import given_weights
from nnunet_cpr.nnunet.tools.explain_name import explain
from tests.helpers.workspace import PLANS, Workspace

NAME = "nnUNetTrainerCPR_ki0x1_preLiver_1epochs_2iters_seed1"


@pytest.fixture(scope="module")
def start(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a training from random weights."""
    space = workspace.with_results_in(tmp_path_factory.mktemp("start"))
    return space.finish("nnUNetTrainerSGD_seed0") / "checkpoint_final.pth"


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    return workspace.with_results_in(tmp_path)


def refuse(space: Workspace, capsys: pytest.CaptureFixture, *options: str) -> str:
    """Return the one line in which a training is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit):
        space.train_here(NAME, *options)
    (line,) = (each for each in capsys.readouterr().err.splitlines() if each.startswith("nnunet-cpr: "))
    assert not (space.fold(NAME) / "checkpoint_final.pth").exists()
    return line


def test_training_records_the_weights_that_it_began_with(
    space: Workspace, start: Path, capsys: pytest.CaptureFixture
) -> None:
    record = {"path": str(start), "sha256": hashlib.sha256(start.read_bytes()).hexdigest()}
    space.train_here(NAME, "-pretrained_weights", str(start))
    assert space.checkpoint(NAME)["init_args"][PRETRAINED] == record
    assert f"weights {start}, SHA-256 {record['sha256']}" in space.logs(NAME)[0].read_text()
    space.train_here(NAME, "--c")  # finished; the record stays, and none is needed
    assert space.checkpoint(NAME)["init_args"][PRETRAINED] == record
    with pytest.raises(SystemExit):
        space.train_here(NAME, "--c", "-pretrained_weights", str(start))
    assert "leave -pretrained_weights out" in capsys.readouterr().err


def test_training_of_the_suffix_begins_with_pretrained_weights_only(
    space: Workspace, start: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    for options in ((), ("--c",)):
        line = refuse(space, capsys, *options)
        assert "expected pretrained weights, as _preLiver says, got none; give -pretrained_" in line
    missing = tmp_path / "missing.pth"
    assert f"got no file {missing}" in refuse(space, capsys, "-pretrained_weights", str(missing))
    damaged = tmp_path / "damaged.pth"
    damaged.write_bytes(start.read_bytes()[:1000])
    assert "damaged.pth cannot be read as a checkpoint" in refuse(
        space, capsys, "-pretrained_weights", str(damaged)
    )
    other = torch.load(start, weights_only=False)
    name = next(name for name in other["network_weights"] if ".seg_layers." not in name)
    other["network_weights"][name] = torch.zeros(3)
    torch.save(other, tmp_path / "other.pth")
    line = refuse(space, capsys, "-pretrained_weights", str(tmp_path / "other.pth"))
    assert f"does not fit the network of {PLANS}, 3d_fullres: {name}: expected shape (4, 1," in line
    # A checkpoint of a training from scratch, which was put into the folder.
    monkeypatch.setattr(sys, "argv", ["nnUNetv2_train"])
    fold = space.fold(NAME)
    fold.mkdir(parents=True, exist_ok=True)
    (fold / "checkpoint_latest.pth").write_bytes(start.read_bytes())
    trainer = space.build(NAME, monkeypatch, continues=True)
    with pytest.raises(SystemExit):
        maybe_load_checkpoint(trainer, True, False)
    assert "without pretrained weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("4 2d 0 -p nnUNetPlans -pretrained_weights /a.pth --npz", "/a.pth"),
        ("4 2d 0 -pretrained_weights=/a.pth -p", "/a.pth"),
        ("4 2d 0 --c", None),
    ],
)
def test_weights_are_read_as_by_nnunets_command(arguments: str, expected: str | None) -> None:
    assert given_weights(arguments.split()) == (None if expected is None else Path(expected))


def test_name_is_explained() -> None:
    assert dict(explain(NAME))["begins with"] == (
        "weights called Liver, by -pretrained_weights CHECKPOINT"
    )
