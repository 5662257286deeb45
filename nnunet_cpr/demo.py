"""Demonstration of CPR on a small synthetic data set, with nnU-Net's own commands."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nnunet_cpr.datasets import phantom
from nnunet_cpr.datasets.small_plans import write_small_plans
from nnunet_cpr.environment import available_cores
from nnunet_cpr.files import add_path_to_os_errors
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet.commands import nnunet_environment, run
from nnunet_cpr.nnunet.history import CSV_NAME
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME

DATASET = "Dataset901_Phantoms"
CONFIGURATION = "3d_fullres"
PLANS = "nnUNetPlansDemo"
TRAINERS = {
    "nnUNetTrainerAdamCPR_ws70_lr3en3_warmup30_3epochs_70iters_seed0": "Adam + CPR",
    "nnUNetTrainerAdamW_lr3en3_warmup30_3epochs_70iters_seed0": "Adam + weight decay",
}


@dataclass
class Result:
    """Result of one trainer.

    Attributes:
        trainer: name of the trainer.
        validation_dice, unseen_dice: mean foreground Dice in [0, 1].
        steps: number of optimizer steps.
        seconds: duration of training and validation.
        folder: folder of the fold.
    """

    trainer: str
    validation_dice: float
    unseen_dice: float
    steps: int
    seconds: float
    folder: Path


def run_demo(folder: Path, console: Console) -> list[Result]:
    """Generate data, train and validate both trainers and predict an unseen case, all in ``folder``.

    Raises:
        Refusal: one of nnU-Net's commands failed.
    """
    processes = max(1, min(4, available_cores() // 2))
    environment = nnunet_environment(folder, processes)
    environment["nnUNet_compile"] = "f"  # compiling would take longer than the training
    raw = folder / "nnUNet_raw" / DATASET
    device = "cuda" if torch.cuda.is_available() else "cpu"

    title = TextColumn("{task.description:<44}")
    columns = title, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def stage(title: str, total: int = 1) -> Callable[[int], None]:
            if not console.is_terminal:
                print(title, flush=True)
            task = progress.add_task(title, total=total)
            return lambda done: progress.update(task, completed=done)

        def nnunet(log: str, *command: str, **options: Any) -> None:
            run([*command], folder / "logs" / f"{log}.log", environment, **options)

        done = stage("generating 10 phantoms and an unseen one")
        with add_path_to_os_errors(raw):
            phantom.write_dataset(raw)
        done(1)

        done = stage("planning and preprocessing")
        dataset_id = DATASET[len("Dataset") :].split("_")[0]
        data = "-d", dataset_id, "-c", CONFIGURATION
        options = "-np", str(processes)
        nnunet("plan_and_preprocess", "nnUNetv2_plan_and_preprocess", *data, *options)
        write_small_plans(folder / "nnUNet_preprocessed" / DATASET, "nnUNetPlans", PLANS, patch=32)
        done(1)

        results = []
        for trainer, label in TRAINERS.items():
            name = parse_trainer_name(trainer)
            assert name is not None and name.epochs is not None
            model = ["-tr", trainer, "-p", PLANS, "-device", device]
            trained = folder / "nnUNet_results" / DATASET / f"{trainer}__{PLANS}__{CONFIGURATION}"
            output = trained / "fold_0"
            done = stage(f"training and validating {label}", name.epochs)
            start = time.monotonic()
            command = "nnUNetv2_train", dataset_id, CONFIGURATION, "0", *model
            nnunet(
                f"train_{trainer}",
                *command,
                on_wait=lambda process: done(_epochs_done(output)),  # noqa: B023  (used within the iteration)
            )
            seconds = time.monotonic() - start
            done(name.epochs)

            done = stage(f"predicting the unseen case, {label}")
            predictions = folder / "predictions" / trainer
            places = "-i", str(raw / "imagesTs"), "-o", str(predictions)
            workers = "-npp", "1", "-nps", "1"
            nnunet(f"predict_{trainer}", "nnUNetv2_predict", *places, *data, "-f", "0", *model, *workers)
            done(1)
            dice = _validation_dice(output / "validation" / "summary.json")
            unseen = _mean_dice(raw / "labelsTs", predictions)
            results.append(Result(trainer, dice, unseen, name.training.steps, seconds, output))
    return results


def print_results(results: list[Result], files: list[Path], console: Console) -> None:
    """Print a table of the results and the paths of the figures."""
    table = Table(title="Foreground Dice on synthetic phantoms")
    for heading in ("trainer", "2 validation cases", "unseen case", "steps", "seconds"):
        table.add_column(heading, justify="left" if heading == "trainer" else "right")
    for r in results:
        dice = f"{r.validation_dice:.3f}", f"{r.unseen_dice:.3f}"
        table.add_row(TRAINERS[r.trainer], *dice, str(r.steps), f"{r.seconds:.0f}")
    console.print(table)
    console.print(
        "These short runs on easy data show that everything works, not which trainer is better."
    )
    for file in files:
        console.print(f"see {file}", soft_wrap=True, markup=False)


def figures(results: list[Result]) -> list[Path]:
    """Return the figures and records of the results."""
    files = (r.folder / name for r in results for name in (FIGURE_NAME, CSV_NAME, "progress.png"))
    return [file for file in files if file.exists()]


def keep_only(files: list[Path], folder: Path) -> list[Path]:
    """Move files to the top of ``folder``, prefixed with the trainer's name, and delete the rest."""
    kept = []
    for file in files:
        trainer = file.parent.parent.name.split("__")[0]
        kept.append(folder / f"{trainer}_{file.name}")
        shutil.move(file, kept[-1])
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
    return kept


def _epochs_done(output: Path) -> int:
    logs = sorted(output.glob("training_log_*.txt"))
    return logs[-1].read_text(errors="replace").count("Epoch time:") if logs else 0


def _mean_dice(labels: Path, predictions: Path) -> float:
    """Return the mean Dice over cases and foreground labels as computed by nnU-Net."""
    from nnunetv2.evaluation.evaluate_predictions import compute_metrics
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    foreground = [label for label in phantom.LABELS.values() if label]
    values = [
        metrics["Dice"]
        for truth in sorted(labels.glob("*.nii.gz"))
        for metrics in compute_metrics(
            str(truth), str(predictions / truth.name), SimpleITKIO(), foreground
        )["metrics"].values()
    ]
    return sum(values) / len(values)


def _validation_dice(summary: Path) -> float:
    return float(json.loads(summary.read_text())["foreground_mean"]["Dice"])
