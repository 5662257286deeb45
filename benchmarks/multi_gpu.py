"""Is ``-num_gpus 2`` right and resumable? For a release: ``python -m benchmarks.multi_gpu FOLDER``.

Two processes train, are killed and resume; both must have the same bounds, multipliers and weights, bit
for bit. Bounds that follow from the initial weights must be the same on one GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from torch import Tensor

from nnunet_cpr import demo
from nnunet_cpr.datasets import phantom
from nnunet_cpr.datasets.small_plans import write_small_plans
from nnunet_cpr.nnunet.commands import nnunet_environment, run
from nnunet_cpr.refusals import Refusal

GPUS = 2
EPOCHS = 3
ITERATIONS = 20
WARM = "nnUNetTrainerWatchedWarm"
INITIAL = "nnUNetTrainerWatchedInitial"
TRAINERS = f'''
import torch

from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet.base_trainer import parts_of
from nnunet_cpr.nnunet.trainer import nnUNetTrainerAdamCPR, nnUNetTrainerCPR


class Watched:
    """Save the final state of each process."""

    def on_train_end(self):
        held = {{
            "network": self.network.state_dict(),
            "cpr": self.cpr.state_dict(),
            "writes_history": parts_of(self).progress.history is not None,
        }}
        torch.save(held, f"{{self.output_folder}}/rank_{{self.local_rank}}.pth")
        super().on_train_end()


class {WARM}(Watched, nnUNetTrainerCPR):
    settings = parse_trainer_name("nnUNetTrainerCPR_ws10_{EPOCHS}epochs_{ITERATIONS}iters_seed1")


class {INITIAL}(Watched, nnUNetTrainerAdamCPR):
    settings = parse_trainer_name(
        "nnUNetTrainerAdamCPR_ki0x0p9_warmup5_{EPOCHS}epochs_{ITERATIONS}iters_seed1"
    )
'''


class EpochReached(Exception):
    """The epoch at which the training is to be killed."""


class Disagreement(Exception):
    """States that should be equal are not."""


@dataclass
class Trainings:
    """Commands of nnU-Net in one folder."""

    folder: Path
    environment: dict[str, str]

    def fold(self, trainer: str) -> Path:
        model = f"{trainer}__{demo.PLANS}__{demo.CONFIGURATION}"
        return Path(self.environment["nnUNet_results"]) / demo.DATASET / model / "fold_0"

    def prepare(self) -> None:
        phantom.write_dataset(self.folder / "nnUNet_raw" / demo.DATASET, training_cases=5)
        command = ["nnUNetv2_plan_and_preprocess", "-d", "901", "-c", demo.CONFIGURATION, "-np", "2"]
        run(command, self.folder / "logs" / "plan_and_preprocess.log", self.environment)
        preprocessed = self.folder / "nnUNet_preprocessed" / demo.DATASET
        write_small_plans(preprocessed, "nnUNetPlans", demo.PLANS, patch=32)
        trainers = self.folder / "trainers"
        trainers.mkdir()
        (trainers / "watched.py").write_text(TRAINERS)
        folders = [str(trainers), os.environ.get("nnUNet_extTrainer", "")]
        self.environment["nnUNet_extTrainer"] = os.pathsep.join(f for f in folders if f)

    def train(self, trainer: str, gpus: int, *options: str, until: str | None = None) -> None:
        """Train, and kill all processes when ``until`` is in the training log."""

        def check_log(process: int) -> None:
            logs = "".join(f.read_text() for f in self.fold(trainer).glob("training_log_*.txt"))
            if until is not None and until in logs:
                raise EpochReached

        print(f"training {trainer} on {gpus} GPUs {' '.join(options)}", flush=True)
        command = ["nnUNetv2_train", "901", demo.CONFIGURATION, "0", "-tr", trainer, "-p", demo.PLANS]
        log = self.folder / "logs" / f"{trainer}_{gpus}{''.join(options)}.log"
        run([*command, "-num_gpus", str(gpus), *options], log, self.environment, on_wait=check_log)

    def held(self, trainer: str, processes: int) -> list[dict[str, Any]]:
        paths = [self.fold(trainer) / f"rank_{rank}.pth" for rank in range(processes)]
        return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]

    def history(self, trainer: str) -> pd.DataFrame:
        return pd.read_csv(self.fold(trainer) / "cpr_history.csv")


def check_resume_after_kill(trainings: Trainings) -> None:
    """Check that a training with bounds from its first epoch resumes after a kill in its third."""
    try:
        trainings.train(WARM, GPUS, until="Epoch 2")
    except EpochReached:
        pass
    else:
        raise Disagreement("the training ended before it could be killed")
    best = torch.load(trainings.fold(WARM) / "checkpoint_best.pth", "cpu", weights_only=False)
    before = trainings.history(WARM)
    before = before[before["epoch"] < best["current_epoch"]]  # from which the training resumes
    trainings.train(WARM, GPUS, "--c")
    check_processes(trainings.held(WARM, GPUS))
    after = trainings.history(WARM)
    require(after[: len(before)].equals(before), "the saved epochs are unchanged")
    check_history(after, trainings.held(WARM, GPUS)[0])
    require((after["multiplier"] > 0).any(), "multipliers rise above 0")


def check_against_one_gpu(trainings: Trainings) -> None:
    """Check that one GPU with the same seed, and so the same initial weights, has the same bounds."""
    trainings.train(INITIAL, GPUS)
    two = trainings.held(INITIAL, GPUS)
    check_processes(two)
    check_history(trainings.history(INITIAL), two[0])
    trainings.environment["nnUNet_results"] = str(trainings.folder / "nnUNet_results_one_gpu")
    trainings.train(INITIAL, 1)
    (one,) = trainings.held(INITIAL, 1)
    check_history(trainings.history(INITIAL), one)
    require(one["cpr"]["names"] == two[0]["cpr"]["names"], "one GPU regularizes the same matrices")
    kappa = one["cpr"]["state"]["kappa"], two[0]["cpr"]["state"]["kappa"]
    require(torch.allclose(*kappa, rtol=1e-6, atol=0), "one GPU has the same bounds to 1e-6")


def check_processes(held: list[dict[str, Any]]) -> None:
    """Check that all processes have the same state, bit for bit."""
    first, *others = held
    for other in others:
        for part in ("network", "cpr"):
            a, b = tensors(first[part]), tensors(other[part])
            same = len(a) == len(b) and all(map(torch.equal, a, b))
            require(same, f"all processes hold the same {part}, bit for bit")
    writing = [one["writes_history"] for one in held]
    require(writing == [True] + [False] * len(others), "the first process alone writes the history")


def check_history(history: pd.DataFrame, held: dict[str, Any]) -> None:
    """Check that the history has every matrix and epoch, and ends with the saved state."""
    names = held["cpr"]["names"]
    require(history["parameter"].tolist() == names * EPOCHS, "the history has every matrix and epoch")
    last = history[-len(names) :]
    require(bool((last["step"] == EPOCHS * ITERATIONS).all()), "every step was counted")
    for column, key in (("kappa", "kappa"), ("multiplier", "lagrange_multiplier")):
        recorded = last[column].to_numpy(np.float32)
        same = np.array_equal(recorded, held["cpr"]["state"][key].numpy())
        require(same, f"the history's {column} is what the processes hold")


def tensors(state: dict[str, Any]) -> list[Tensor]:
    """Return all tensors in a nested state, in order."""
    found: list[Tensor] = []
    for value in state.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors(value)
    return found


def require(holds: bool, what: str) -> None:
    """Print a condition that holds; raise if it does not hold."""
    if not holds:
        raise Disagreement(f"failed: {what}")
    print(f"ok: {what}", flush=True)


def main(folder: Annotated[Path, typer.Argument(help="New folder for data, logs, results.")]) -> None:
    """Check nnU-Net's training on two GPUs; exit with 1 if a check fails."""
    if torch.cuda.device_count() < GPUS:
        raise SystemExit(f"expected {GPUS} GPUs, got {torch.cuda.device_count()}")
    if folder.exists():
        raise SystemExit(f"{folder} exists; choose a new folder")
    folder = folder.resolve()
    trainings = Trainings(folder, nnunet_environment(folder, processes=2))
    try:
        trainings.prepare()
        check_resume_after_kill(trainings)
        check_against_one_gpu(trainings)
    except (Refusal, Disagreement, OSError) as error:
        raise SystemExit(str(error)) from None
    print("all checks passed")


if __name__ == "__main__":
    typer.run(main)
