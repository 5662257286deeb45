"""Short measurement of an epoch: a few iterations of the real trainer in a temporary folder.

It runs in a process of its own: ``python -m nnunet_cpr.studies.measurement OUTPUT DATASET ...``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from nnunet_cpr._cores import available_cores
from nnunet_cpr._files import finite_number, read_json
from nnunet_cpr.nnunet.commands import CommandFailed
from nnunet_cpr.nnunet.commands import run as run_command
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
from nnunet_cpr.studies.definition import Run

_SKIPPED = 2
"""Iterations before the measurement, which compile kernels and fill the queues of the data loader."""
_ITERATIONS = 20
_SECONDS = 60.0
"""Time after which no further iteration is started."""
_PREFIX = "nnunet-cpr-measurement-"


@dataclass(frozen=True)
class Measurement:
    """Result of a short training.

    Attributes:
        epoch_seconds: time of an epoch of the trainer's number of iterations.
        epochs: number of epochs that the trainer plans.
        checkpoint_bytes: size of a checkpoint.
    """

    epoch_seconds: float
    epochs: int
    checkpoint_bytes: int


def measure(run: Run, device: str, environment: Mapping[str, str]) -> Measurement:
    """Train a few iterations in a process of its own.

    Args:
        run: a run whose data set is preprocessed; nnU-Net's fold ``all`` needs no split.
        device: nnU-Net's ``-device``.
        environment: environment variables for nnU-Net, with its folders.

    Raises:
        CommandFailed: the training failed.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        output, log = Path(folder) / "measurement.json", Path(folder) / "log.txt"
        arguments = [run.dataset, run.configuration, run.plans, run.trainer, device]
        module = [sys.executable, "-m", "nnunet_cpr.studies.measurement", str(output), *arguments]
        variables = {
            **os.environ,
            **environment,
            "nnUNet_results": folder,
            "NNUNET_CPR_RESULTS": environment["nnUNet_results"],
            "nnUNet_wandb_enabled": "0",
        }
        try:
            run_command(module, log, variables)
        except CommandFailed as error:
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            reason = lines[-1] if lines else str(error)
            raise CommandFailed(f"--measure: {run.trainer} on {run.dataset} failed: {reason}") from None
        result = read_json(output)
    seconds = finite_number(result["epoch_seconds"])
    assert seconds is not None  # written below
    return Measurement(seconds, int(result["epochs"]), int(result["checkpoint_bytes"]))


def _main(output: str, dataset: str, configuration: str, plans: str, trainer: str, device: str) -> None:
    import torch
    from nnunetv2.run.run_training import get_trainer_from_args

    if device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", available_cores())))
    torch.backends.cudnn.benchmark = device == "cuda"  # as nnUNetv2_train sets it
    training = get_trainer_from_args(
        dataset, configuration, "all", trainer, plans, device=torch.device(device)
    )
    previous = training.folder_with_segs_from_previous_stage
    if previous is not None:  # of the real results
        below = Path(previous).relative_to(os.environ["nnUNet_results"])
        training.folder_with_segs_from_previous_stage = str(
            Path(os.environ["NNUNET_CPR_RESULTS"]) / below
        )
    training.on_train_start()
    training.on_epoch_start()
    training.on_train_epoch_start()
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    step = _seconds_per_call(lambda: training.train_step(next(training.dataloader_train)), synchronize)
    with torch.no_grad():
        training.on_validation_epoch_start()
        validation_step = _seconds_per_call(
            lambda: training.validation_step(next(training.dataloader_val)), synchronize
        )
    training.on_train_end()  # writes the checkpoint and stops the data loaders
    checkpoint = Path(training.output_folder) / FINAL_CHECKPOINT
    seconds = step * training.num_iterations_per_epoch
    seconds += validation_step * training.num_val_iterations_per_epoch
    result = {
        "epoch_seconds": seconds,
        "epochs": training.num_epochs,
        "checkpoint_bytes": checkpoint.stat().st_size if checkpoint.exists() else 0,
    }
    Path(output).write_text(json.dumps(result))


def _seconds_per_call(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Return the median seconds of a call, after a few calls that are not counted."""
    end = time.monotonic() + _SECONDS
    times: list[float] = []
    while len(times) < _SKIPPED + _ITERATIONS and (len(times) <= _SKIPPED or time.monotonic() < end):
        start = time.monotonic()
        call()
        synchronize()
        times.append(time.monotonic() - start)
    return median(times[_SKIPPED:])


if __name__ == "__main__":
    _main(*sys.argv[1:])
