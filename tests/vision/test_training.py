"""Training, interrupting, resuming and recording of runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock

from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.refusals import Refusal, RefusedItem
from nnunet_cpr.vision.task import Setup, Task
from nnunet_cpr.vision.training import (
    CHECKPOINT,
    DYNAMICS,
    HISTORY,
    RESULT,
    run_folder,
    train,
)


def build_setup(data: Path | None, device: torch.device) -> Setup:
    """Linear separation of noise, with dropout, so that the training draws random numbers."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, 6, generator=generator)
    y = (x[:, :3].sum(1) > 0).long()

    def batches():
        return ((x[i], y[i]) for i in torch.randperm(len(x)).split(12))

    def evaluate(model):
        assert not model.training
        logits = model(x)
        right = (logits.argmax(1) == y).float().mean().item()
        return {
            "accuracy": 100 * right,
            "loss": torch.nn.functional.cross_entropy(logits, y).item(),
        }

    model = torch.nn.Sequential(
        *(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU()),
        *(torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)),
    )
    return Setup(model, batches, evaluate, lambda model: {"last": 1.0})


TASK = Task(
    name="line",
    setup=build_setup,
    steps=26,
    warmup=4,
    lr={"adam": 1e-2, "sgd": 0.1, "muon": 1e-2, "amos": 1e-2},
)
REFUSES = dataclasses.replace(TASK, setup=lambda data, device: pytest.fail("trained again"))
SGD = parse_run_name("SGD")


class Stopped(Exception):
    pass


def train_for(steps: int, name: str, results: Path) -> None:
    """Train a run, and stop it after this number of steps."""
    left = itertools.count(steps - 1, -1)

    def stop() -> None:
        if not next(left):
            raise Stopped

    with pytest.raises(Stopped):
        train(TASK, parse_run_name(name), results, progress=stop)


@pytest.mark.parametrize("name", ["AdamCPR_ws9_ada_std", "MuonCPR_ip2", "AMOS_wd0p1"])
def test_resumed_run_equals_uninterrupted_run(name: str, tmp_path: Path) -> None:
    whole = train(TASK, parse_run_name(name), tmp_path / "whole")
    for steps in (3, 17):
        train_for(steps, name, tmp_path / "parts")
    parts = train(TASK, parse_run_name(name), tmp_path / "parts")
    assert parts | {"seconds": 0} == whole | {"seconds": 0}
    a, b = (run_folder(tmp_path / f, TASK, parse_run_name(name)) for f in ("whole", "parts"))
    assert {file.name for file in a.iterdir()} == {file.name for file in b.iterdir()}
    for table in a.glob("*.csv"):
        assert table.read_bytes() == (b / table.name).read_bytes()


def test_run_writes_its_files(tmp_path: Path) -> None:
    result = train(TASK, parse_run_name("AdamCPR_ws9_seed2"), tmp_path)
    assert train(REFUSES, parse_run_name("AdamCPR_ws9_seed2"), tmp_path) == result
    folder = tmp_path / "line" / "AdamCPR_ws9_seed2"
    assert {f.name for f in folder.iterdir()} == {HISTORY, DYNAMICS, RESULT, ".lock"}
    assert json.loads((folder / RESULT).read_text()) == result
    assert result["step"] == 26 and result["run"] == "AdamCPR_ws9_lr0p01_warmup4_seed2_26steps"
    history = pd.read_csv(folder / HISTORY)
    assert history["step"].tolist() == [4, 8, 12, 16, 20, 24, 26]
    assert history["last"].notna().tolist() == [False] * 6 + [True]
    dynamics = pd.read_csv(folder / DYNAMICS)
    assert set(dynamics["parameter"]) == {"0.weight", "2.weight", "5.weight"}
    assert np.isinf(dynamics.query("step <= 8")["kappa"]).all()
    assert (dynamics.query("step > 9")["multiplier"] > 0).any()


def test_diverged_run_is_not_repeated(tmp_path: Path) -> None:
    for task in (TASK, REFUSES):
        with pytest.raises(RefusedItem, match="SGD_lr1e38 diverged: its loss is not finite before step"):
            train(task, parse_run_name("SGD_lr1e38"), tmp_path)


def test_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    longer = dataclasses.replace(TASK, steps=30)
    train_for(6, "SGD", tmp_path)
    for file in (CHECKPOINT, RESULT):
        with pytest.raises(Refusal, match=rf"{file}: expected SGD_.*30steps, got .*26steps; use other"):
            train(longer, SGD, tmp_path)
        train(TASK, SGD, tmp_path)


@pytest.mark.parametrize("file", [CHECKPOINT, RESULT])
@pytest.mark.parametrize("content", [b"", b"{", b"PK" * 99])
def test_damaged_file_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, TASK, SGD)
    folder.mkdir(parents=True)
    (folder / file).write_bytes(content)
    with pytest.raises(OSError, match=rf"{file} is damaged; delete \S+ to train the run again") as error:
        train(TASK, SGD, tmp_path)
    assert "\n" not in str(error.value)


def test_run_killed_while_saving_has_whole_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(TASK, SGD, tmp_path / "whole")
    write = pd.DataFrame.to_csv

    def killed(table: pd.DataFrame, *arguments: object, **options: object) -> None:
        if table["step"].iloc[-1] == TASK.steps:
            raise Stopped
        write(table, *arguments, **options)

    monkeypatch.setattr(pd.DataFrame, "to_csv", killed)
    with pytest.raises(Stopped):
        train(TASK, SGD, tmp_path / "parts")
    monkeypatch.undo()
    train(TASK, SGD, tmp_path / "parts")
    whole, parts = (run_folder(tmp_path / f, TASK, SGD) / HISTORY for f in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_gradients_are_clipped(tmp_path: Path) -> None:
    untrained = train(TASK, parse_run_name("SGD_lr1en9_4steps_warmup0_wd0"), tmp_path)
    clipping = dataclasses.replace(TASK, clip=1e-9)
    clipped = train(clipping, parse_run_name("SGD_4steps_warmup0_wd0"), tmp_path)
    assert clipped["loss"] == pytest.approx(untrained["loss"], rel=1e-5)


def test_run_of_another_process_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, TASK, SGD)
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"), pytest.raises(RefusedItem, match="another process trains this run"):
        train(TASK, SGD, tmp_path)
