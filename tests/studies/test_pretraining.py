"""Studies with pretrained weights: runs of their own, and refusal of others."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from nnunet_cpr.nnunet.fold_files import PRETRAINED
from nnunet_cpr.nnunet.parts.weights import sha256
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.local_and_slurm import command_line
from nnunet_cpr.studies.plans_and_weights import begins, check_pretrained
from nnunet_cpr.studies.state import StudyPaths
from nnunet_cpr.studies.study import Study
from nnunet_cpr.studies.worker import Worker
from tests.helpers.workspace import PLANS, Workspace
from tests.studies.study_run import StudyRun, wait_for

SCRATCH = "nnUNetTrainerSGD"
TUNED = "nnUNetTrainerCPR_ki0x1"


def make_study(weights: str, **values: object) -> Study:
    tuned = {"trainer": TUNED, "pretrained": weights}
    return Study(
        "mine", ["Dataset001_A"], [SCRATCH, {**tuned, "trainer": SCRATCH}, tuned], folds=[0, 1], **values
    )


def save_checkpoint(path: Path, arguments: dict | None = None, **weights: torch.Tensor) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"network_weights": weights, "init_args": arguments or {}}, path)
    return sha256.__wrapped__(path)


def test_pretrained_runs_have_folders_of_their_own(tmp_path: Path) -> None:
    study = make_study("A/fold_{fold}/checkpoint_final.pth", seeds=[1])
    runs = list(study.runs())
    assert len({run.folder(tmp_path) for run in runs}) == 6
    trainers = [run.trainer for run in runs[:3]]
    word = trainers[1].split("_")[1]
    assert trainers == [f"{SCRATCH}_seed1", f"{SCRATCH}_{word}_seed1", f"{TUNED}_{word}_seed1"]
    assert runs[0].weights(tmp_path) is None
    assert runs[4].weights(tmp_path) == tmp_path / "A" / "fold_1" / "checkpoint_final.pth"
    assert study.reference == SCRATCH and study.entry(f"{SCRATCH}_{word}").pretrained
    named = Study(
        "mine", ["Dataset001_A"], [{"trainer": "nnUNetTrainerCPR_preA", "pretrained": "/a.pth"}]
    )
    run = next(named.runs())
    assert run.trainer == "nnUNetTrainerCPR_preA" and run.weights(tmp_path) == Path("/a.pth")
    line = command_line(runs[4], "mine", [], {})
    assert f"-tr {SCRATCH}_{word}_seed1" in line
    assert line.endswith("--pretrained A/fold_1/checkpoint_final.pth")


def test_worker_begins_with_the_weights_and_then_continues(tmp_path: Path, monkeypatch) -> None:
    paths = StudyPaths(tmp_path, tmp_path / "studies" / "mine")
    scratch, tuned = list(make_study("a.pth").runs())[:2]
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(Worker, "_run_nnunet", lambda self, request, *options: said.append(options))
    for run in (scratch, tuned):
        with pytest.raises(Refusal, match=r"expected .*summary.json"):
            Worker(run, paths)._train_and_validate(None)
    save_checkpoint(tuned.folder(tmp_path) / "checkpoint_latest.pth")
    with pytest.raises(Refusal, match=r"expected .*summary.json"):
        Worker(tuned, paths)._train_and_validate(None)
    weights = ("-pretrained_weights", str(tmp_path / "a.pth"))
    assert said == [("--c",), ("--val",), weights, ("--val",), ("--c",), ("--val",)]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {name: str(tmp_path / name) for name in ("nnUNet_results", "nnUNet_preprocessed")}


@pytest.mark.parametrize("record", ["other", "none", "same"])
def test_runs_that_began_with_other_weights_are_refused(
    record: str, folders: dict[str, str], tmp_path: Path
) -> None:
    digest = save_checkpoint(tmp_path / "a.pth", weight=torch.ones(1))
    study = make_study(str(tmp_path / "a.pth"))
    run = list(study.runs())[1]
    fold = run.folder(Path(folders["nnUNet_results"]))
    arguments = {PRETRAINED: {"path": "/b.pth", "sha256": digest if record == "same" else "0" * 64}}
    save_checkpoint(fold / "checkpoint_latest.pth", {} if record == "none" else arguments)
    assert not begins(run, StudyPaths.of(study.name, folders))
    if record == "same":
        check_pretrained(study, folders)
        return
    with pytest.raises(Refusal) as refused:
        check_pretrained(study, folders)
    assert f"{fold}: expected a training that began with {tmp_path / 'a.pth'}" in str(refused.value)
    assert ("random weights" if record == "none" else "/b.pth (SHA-256 0000") in str(refused.value)


def test_fine_tuned_training_in_the_place_of_one_from_scratch_is_refused(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """nnU-Net's option without the suffix ``_pre<Word>`` leaves it in this folder."""
    save_checkpoint(tmp_path / "a.pth", weight=torch.ones(1))
    study = make_study(str(tmp_path / "a.pth"))
    fold = next(study.runs()).folder(Path(folders["nnUNet_results"]))
    record = {"path": "/b.pth", "sha256": "0" * 64}
    save_checkpoint(fold / "checkpoint_final.pth", {PRETRAINED: record})
    with pytest.raises(Refusal, match=r"fold_0: expected .* with random weights, got .* /b\.pth \(S"):
        check_pretrained(study, folders)
    save_checkpoint(fold / "checkpoint_final.pth")
    check_pretrained(study, folders)


def test_missing_and_damaged_weights_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"got no file .*nnUNet_results/A/fold_0/final\.pth; write"):
        check_pretrained(make_study("A/fold_{fold}/final.pth"), folders)
    (tmp_path / "a.pth").write_bytes(b"PK")
    with pytest.raises(Refusal, match=r"pretrained: .*a\.pth is damaged"):
        check_pretrained(make_study(str(tmp_path / "a.pth")), folders)
    study = Study("mine", ["Dataset001_A"], ["nnUNetTrainerCPR_preA"], folds=[0])
    with pytest.raises(Refusal, match="nnUNetTrainerCPR_preA: expected an entry 'pretrained'"):
        check_pretrained(study, folders)


def test_one_file_that_is_written_in_two_ways_is_refused(
    folders: dict[str, str], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "nnUNet_results" / "a.pth", weight=torch.ones(1))
    entries = [
        {"trainer": SCRATCH, "pretrained": path}
        for path in ("a.pth", str(tmp_path / "nnUNet_results" / "a.pth"))
    ]
    with pytest.raises(Refusal, match=r"a\.pth are one file; write it in one way"):
        check_pretrained(Study("mine", ["Dataset001_A"], entries), folders)


@pytest.mark.slow
def test_study_of_networks_and_fine_tuning_is_killed_and_continues(
    workspace: Workspace, tmp_path: Path
) -> None:
    """Two plans, and fine-tuning beside a training from scratch of the same name."""
    space = workspace.with_results_in(tmp_path)
    home = Path(space.environment["nnUNet_preprocessed"]) / space.dataset
    plans = json.loads((home / f"{PLANS}.json").read_text())
    network = plans["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [6] * network["n_stages"]
    (home / "nnUNetPlansWider.json").write_text(json.dumps({**plans, "plans_name": "nnUNetPlansWider"}))
    trainer = "nnUNetTrainerCPR_ws2_6epochs_2iters"  # long enough to be killed amid it
    weights = space.finish("nnUNetTrainerSGD_seed7") / "checkpoint_final.pth"
    results = tmp_path / "nnUNet_results"

    tuned = {"trainer": trainer, "pretrained": str(weights), "plans": "nnUNetPlansWider"}
    misfit = StudyRun(space, "misfit", [trainer], [0])
    content = {**yaml.safe_load(misfit.file.read_text()), "trainers": [tuned]}
    misfit.file.write_text(yaml.safe_dump(content))
    misfit.run(status=1)  # found when they are loaded
    said = "".join(path.read_text() for path in (results / "studies" / "misfit" / "logs").iterdir())
    assert f"{weights} does not fit the network of nnUNetPlansWider, 3d_fullres: " in said
    assert not list(results.rglob(f"{trainer}_pre*/fold_0/checkpoint_*"))

    mine = StudyRun(space, "networks", [trainer], [0])
    entries = [tuned, trainer, {"trainer": trainer, "plans": "nnUNetPlansWider", "label": "wider"}]
    content = {**yaml.safe_load(mine.file.read_text()), "trainers": entries, "reference": "wider"}
    tuned["plans"] = PLANS
    mine.file.write_text(yaml.safe_dump(content))
    fold = next(mine.study().runs()).folder(results)
    process = mine.start()
    wait_for(lambda: (fold / "progress.png").exists(), process)
    mine.kill_everything(process)
    assert not (fold / "checkpoint_final.pth").exists()
    mine.run()
    assert "3 of 3 done" in mine.command("status")
    for run in mine.study().runs():
        path = run.folder(results) / "checkpoint_final.pth"
        record = torch.load(path, weights_only=False)["init_args"].get(PRETRAINED)
        assert (record["path"] if record else "") == run.pretrained

    mine.command("report")
    rows = pd.read_csv(results / "studies" / "networks" / "report" / "comparisons.csv")
    keys = [entry.key for entry in mine.study().trainers]
    assert set(rows["reference"]) == {keys[2]} and set(rows["trainer"]) == set(keys[:2])
