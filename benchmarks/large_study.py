"""Are study commands fast with 500 runs? For users of studies: ``python -m benchmarks.large_study``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import machine
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, RESOURCES
from nnunet_cpr.nnunet.history import COLUMNS, CSV_NAME
from nnunet_cpr.studies.study import Run, Study
from nnunet_cpr.studies.study_file import save

NAME = "large"
DATASET = "Dataset001_Large"
CONFIGURATION, PLANS, IDENTIFIER = "3d_fullres", "nnUNetPlans", "nnUNetPlans_3d_fullres"
CLASSES = 3
_EPOCH_SECONDS = 100.0
_TEMPLATES = 8
"""Number of different logs and histories; the runs share them as hard links, which saves space."""
REFERENCE = "import torch"
MAXIMA = {"status": (0.5, 1.7), "run": (0.5, 1.5), "report": (14.0, 24.0)}
"""Limits of the processor times for no run and for :data:`_RUNS`, as multiples of the reference's.

The reference takes about 2 s, so the limits of the many runs stand for some 3 s of ``status`` and the
start of ``run``, and for some 48 s of ``report``. Beside other work the ratio of a report of 50 runs was
between 7.3 and 10.9. The number of its figures is limited.
"""
_RUNS = 500
COMMAND = [sys.executable, "-c", "from nnunet_cpr.cli import main; main()"]

RepeatsOption = Annotated[int, typer.Option(min=1, help="Number of measurements; the smallest counts.")]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Size:
    """Size of a synthetic study; half of its trainers are of CPR and have a history.

    Attributes:
        trainers, folds: number of trainers and folds; each pair is a run.
        epochs: number of epochs of each run.
        cases: number of validation cases of each fold.
        matrices: number of parameter matrices in a history.
    """

    trainers: int = 100
    folds: int = 5
    epochs: int = 1000
    cases: int = 50
    matrices: int = 32

    @property
    def runs(self) -> int:
        return self.trainers * self.folds


@dataclass(frozen=True)
class Cost:
    """Cost of a process.

    Attributes:
        cpu: user and system time in seconds, those of child processes included.
        wall: wall time in seconds.
    """

    cpu: float
    wall: float


def write_study(folder: Path, size: Size) -> dict[str, str]:
    """Write the study file and nnU-Net's folders of a study whose runs are all finished.

    Returns:
        The environment variables of nnU-Net's folders.
    """
    names = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
    folders = {name: str(folder / name) for name in names}
    for path in folders.values():
        Path(path).mkdir(parents=True)
    trainers = [_trainer(number) for number in range(size.trainers)]
    study = Study(NAME, (DATASET,), trainers, folds=tuple(range(size.folds)))  # type: ignore[arg-type]
    save(study, folder / f"{NAME}.yaml")
    _write_preprocessed(folder / "nnUNet_preprocessed" / DATASET, size)
    _write_runs(study, folder / "nnUNet_results", folder / "templates", size)
    return folders


def _trainer(number: int) -> str:
    """Return the name of a trainer; the first is the reference, every second one is of CPR."""
    if number == 0:
        return "nnUNetTrainer"
    if number % 2:
        return f"nnUNetTrainerCPR_ws{100 * number}"
    return f"nnUNetTrainerAdamW_wd{number}en4"


def _case_names(fold: int, size: Size) -> list[str]:
    return [f"large_{fold * size.cases + number:05d}" for number in range(size.cases)]


def _write_preprocessed(home: Path, size: Size) -> None:
    """Write the files by which ``study run`` sees that the data set is planned and preprocessed."""
    by_fold = [_case_names(fold, size) for fold in range(size.folds)]
    cases = [case for names in by_fold for case in names]
    splits = [{"train": sorted(set(cases) - set(val)), "val": val} for val in by_fold]
    labels = {"background": 0, **{f"organ {number}": number for number in range(1, CLASSES + 1)}}
    _write_json(home / "dataset.json", {"labels": labels, "file_ending": ".nii.gz"})
    _write_json(home / "splits_final.json", splits)
    plans = {"configurations": {CONFIGURATION: {"data_identifier": IDENTIFIER}}}
    _write_json(home / f"{PLANS}.json", plans)
    for subfolder, ending in ((IDENTIFIER, ".pkl"), ("gt_segmentations", ".nii.gz")):
        (home / subfolder).mkdir()
        for case in cases:
            (home / subfolder / f"{case}{ending}").touch()  # only the names are read


def _write_runs(study: Study, results: Path, templates: Path, size: Size) -> None:
    rng = np.random.default_rng(0)
    templates.mkdir()
    checkpoint = templates / FINAL_CHECKPOINT
    torch.save({"network_weights": {"weight": torch.zeros(8)}}, checkpoint)
    logs = [templates / f"training_log_{number}.txt" for number in range(_TEMPLATES)]
    histories = [templates / f"history_{number}.csv" for number in range(_TEMPLATES)]
    for log, history in zip(logs, histories):
        log.write_text(_log(size, rng))
        history.write_text(_history(size, rng))
    difficulty = {
        case: rng.uniform(0.6, 0.9, CLASSES) for fold in study.folds for case in _case_names(fold, size)
    }
    for number, run in enumerate(study.runs()):
        folder = run.folder(results)
        _write_json(folder / "validation" / "summary.json", _summary(run, size, difficulty, rng))
        _write_json(folder / RESOURCES, {"seconds": 1e5})
        os.link(checkpoint, folder / FINAL_CHECKPOINT)
        os.link(logs[number % _TEMPLATES], folder / "training_log_2026_1_2_03_04_05.txt")
        if "CPR" in run.trainer:
            os.link(histories[number % _TEMPLATES], folder / CSV_NAME)
        if run.fold == 0:
            source = results.parent / "nnUNet_preprocessed" / DATASET / "dataset.json"
            os.link(source, folder.parent / "dataset.json")


def _log(size: Size, rng: np.random.Generator) -> str:
    """Return a training log in nnU-Net's format."""
    stamp = "2026-01-02 03:04:05.678901:"
    lines = ["", "#" * 71, "Please cite the following paper when using nnU-Net:", "#" * 71, " "]
    lines += [f"{stamp} do_dummy_2d_data_aug: False ", f"{stamp} Using torch.compile... "]
    for epoch in range(size.epochs):
        progress = 1 - np.exp(-6 * epoch / size.epochs)
        train, val = -0.9 * progress + rng.normal(0, 0.02, 2)
        dice = np.clip(0.9 * progress + rng.normal(0, 0.01, CLASSES), 0, 1)
        lines += [
            f"{stamp}  ",
            f"{stamp} Epoch {epoch} ",
            f"{stamp} Current learning rate: {0.01 * (1 - epoch / size.epochs) ** 0.9:.5f} ",
            f"{stamp} train_loss {train:.4f} ",
            f"{stamp} val_loss {val:.4f} ",
            f"{stamp} Pseudo dice [{', '.join(f'np.float32({value:.4f})' for value in dice)}] ",
            f"{stamp} Epoch time: {_EPOCH_SECONDS + rng.normal():.2f} s ",
        ]
        if epoch % 10 == 0:
            lines.append(f"{stamp} Yayy! New best EMA pseudo Dice: {dice.mean():.4f} ")
    lines += [f"{stamp} Training done. "]
    return "\n".join(lines) + "\n"


def _history(size: Size, rng: np.random.Generator) -> str:
    """Return a ``cpr_history.csv``."""
    names = [f"encoder.stages.{i // 4}.0.convs.{i % 4}.conv.weight" for i in range(size.matrices)]
    values = rng.uniform(0.5, 1.5, (size.epochs, size.matrices, 2)).astype(np.float32)
    lines = [",".join(COLUMNS)]
    for epoch, of_epoch in enumerate(values.tolist()):
        for name, (measure, multiplier) in zip(names, of_epoch):
            kappa = "inf" if epoch < size.epochs // 50 else "0.987654328"
            lines.append(f"{epoch},{250 * (epoch + 1)},{name},{measure:.9g},{kappa},{multiplier:.9g}")
    return "\r\n".join(lines) + "\r\n"


def _summary(
    run: Run, size: Size, difficulty: dict[str, np.ndarray], rng: np.random.Generator
) -> dict[str, Any]:
    """Return a ``validation/summary.json`` in nnU-Net's format."""
    cases = []
    for case in _case_names(run.fold, size):
        dice = np.clip(difficulty[case] + rng.normal(0, 0.03, CLASSES), 0, 1)
        metrics = {str(label + 1): _metrics(value) for label, value in enumerate(dice.tolist())}
        files = {
            "prediction_file": f"/results/fold_{run.fold}/validation/{case}.nii.gz",
            "reference_file": f"/preprocessed/{DATASET}/gt_segmentations/{case}.nii.gz",
        }
        cases.append({"metrics": metrics, **files})
    mean = float(np.mean([m["Dice"] for case in cases for m in case["metrics"].values()]))  # type: ignore[attr-defined]
    return {"foreground_mean": _metrics(mean), "mean": {}, "metric_per_case": cases}


def _metrics(dice: float) -> dict[str, float]:
    counts = {"FN": 1e3, "FP": 1e3, "TN": 1e6, "TP": 1e4, "n_pred": 1.1e4, "n_ref": 1.1e4}
    return {"Dice": dice, "IoU": dice / (2 - dice), **counts}


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def measure(arguments: list[str], environment: dict[str, str], status: int = 0) -> tuple[Cost, str]:
    """Return the cost of a command and its output.

    Raises:
        RuntimeError: the exit status is not the expected one.
    """
    # One thread for each library: idle threads that wait for work would count as processor time.
    fixed = {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        arguments,
        env={**os.environ, **environment, **fixed},
        capture_output=True,
        text=True,
        check=False,
    )
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode != status:
        raise RuntimeError(f"{arguments[3:]}: exit status {done.returncode}: {done.stderr.strip()}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(cpu, wall), done.stdout


def measure_all(folder: Path, size: Size, repeats: int, names: Sequence[str]) -> dict[str, Cost]:
    """Write a study and return the smallest cost of each command and of the reference.

    Raises:
        RuntimeError: a command failed or does not show that all runs are done.
    """
    environment = write_study(folder, size)
    file = str(folder / f"{NAME}.yaml")
    commands = {
        REFERENCE: [sys.executable, "-c", "import torch"],
        "status": [*COMMAND, "study", "status", file, "--once"],
        "run": [*COMMAND, "study", "run", file, "--device", "cpu"],
        "report": [*COMMAND, "study", "report", file],
    }
    expected = {
        REFERENCE: "",
        "status": f"{size.runs} of {size.runs} done",
        "run": "all done",
        "report": "report.html",
    }
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name in [REFERENCE, *names]:
            cost, output = measure(commands[name], environment)
            if expected[name] not in output:
                raise RuntimeError(f"study {name}: expected {expected[name]!r}, got {output!r}")
            costs[name].append(cost)
    return {
        name: Cost(min(each.cpu for each in found), min(each.wall for each in found))
        for name, found in costs.items()
        if found
    }


def limits(costs: Mapping[str, Cost], runs: int) -> list[tuple[Limit, float]]:
    """Return the limits for a number of runs of 1,000 epochs.

    The processor time is divided by that of the import of torch, which takes longer on a slow or busy
    machine, too.
    """
    text = "{:.1f}".format
    return [
        (
            Limit(f"{name} / {REFERENCE}", none + (many - none) * runs / _RUNS, text=text),
            costs[name].cpu / costs[REFERENCE].cpu,
        )
        for name, (none, many) in MAXIMA.items()
        if name in costs
    ]


@app.command()
def main(
    command: Annotated[
        list[str] | None, typer.Option(help="Only this command; may be given several times.")
    ] = None,
    trainers: Annotated[int, typer.Option(min=2, help="Number of trainers.")] = Size.trainers,
    folds: Annotated[int, typer.Option(min=1, help="Number of folds.")] = Size.folds,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs of a run.")] = Size.epochs,
    cases: Annotated[int, typer.Option(min=1, help="Number of cases of a fold.")] = Size.cases,
    repeats: RepeatsOption = 3,
    checks: CheckOption = False,
) -> None:
    """Measure study status, report and the start of run for a large study whose runs are finished."""
    console = Console(width=110)
    unknown = set(command or []) - set(MAXIMA)
    if unknown:
        raise typer.BadParameter(f"unknown command {unknown.pop()!r}; choose from {', '.join(MAXIMA)}")
    console.print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    size = Size(trainers, folds, epochs, cases)
    with TemporaryDirectory() as folder:
        costs = measure_all(Path(folder), size, repeats, command or list(MAXIMA))
    table = Table(title=f"{size.runs} runs of {epochs} epochs, smallest of {repeats} measurements")
    table.add_column("command")
    for heading in ("processor time, s", "wall time, s"):
        table.add_column(heading, justify="right")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.cpu:.1f}", f"{cost.wall:.1f}")
    console.print(table)
    if not check_limits(limits(costs, size.runs), console) and checks:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
