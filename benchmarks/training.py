"""Whole trainings with nnU-Net's own command: ``python -m benchmarks.training --help``.

Every training is a process of its own, timed from its start to its end, with the time of its parts.
Stock nnU-Net and CPR train in turn on small phantoms, so that the steps do not hide what surrounds them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import machine
from nnunet_cpr import demo
from nnunet_cpr._files import atomic_write
from nnunet_cpr.datasets import phantom
from nnunet_cpr.nnunet.commands import nnunet_environment, run

STOCK = "nnUNetTrainer"
TRAINERS = (
    STOCK,
    "nnUNetTrainerSGD",
    "nnUNetTrainerCPR_ws40",
    "nnUNetTrainerAdamCPR_warmup20",
)
EPOCHS, ITERATIONS, VALIDATION_ITERATIONS = 30, 5, 2

START, STEPS, CHECKS, ENDS, CHECKPOINTS, VALIDATION, EXIT = PARTS = (
    "start-up",
    "training steps",
    "validation steps",
    "epoch ends",
    "checkpoints",
    "final validation",
    "rest",
)
"""Parts of a training; the rest is mostly waiting for batches."""
_METHODS = {
    "train_step": STEPS,
    "validation_step": CHECKS,
    "on_train_start": START,
    "on_epoch_start": ENDS,
    "on_train_epoch_start": ENDS,
    "on_train_epoch_end": ENDS,
    "on_validation_epoch_start": ENDS,
    "on_validation_epoch_end": ENDS,
    "on_epoch_end": ENDS,
    "on_train_end": ENDS,
    "save_checkpoint": CHECKPOINTS,
    "perform_actual_validation": VALIDATION,
}
_TIMES = "BENCHMARK_TIMES"
"""Environment variable with the file of the times of a training."""

Seconds = dict[str, float]

app = typer.Typer(add_completion=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1, help="Number of trainings with each trainer.")] = 3,
    checks: CheckOption = False,
    output: Annotated[Path | None, typer.Option(help="Folder for training.json.")] = None,
) -> None:
    """Time whole trainings of nnU-Net's trainer and of CPR's, in turn, by their parts."""
    console = Console(width=120)
    machine_info = machine("cpu")
    console.print(", ".join(f"{key} {value}" for key, value in machine_info.items()))
    with TemporaryDirectory() as folder:
        environment = _prepare(Path(folder))
        times = _train_in_turn(Path(folder), environment, rounds, console)
    for clock in ("wall", "processor"):
        console.print(_table(clock, times))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        with atomic_write(output / "training.json") as temporary:
            document = {"machine": machine_info, "epochs": EPOCHS, "iterations": ITERATIONS}
            temporary.write_text(json.dumps({**document, "trainings": times}, indent=1) + "\n")
        console.print(f"written: {output / 'training.json'}", soft_wrap=True)
    if not check_limits(_limits(times), console) and checks:
        raise typer.Exit(1)


def _prepare(folder: Path) -> dict[str, str]:
    """Write, plan and preprocess phantoms, and return the environment of nnU-Net's commands."""
    environment = nnunet_environment(folder, processes=1)
    raw = folder / "nnUNet_raw" / demo.DATASET
    phantom.write_dataset(raw)
    command = ["nnUNetv2_plan_and_preprocess", "-d", "901", "-c", demo.CONFIGURATION, "-np", "1"]
    run(command, folder / "logs" / "plan.log", environment)
    preprocessed = folder / "nnUNet_preprocessed" / demo.DATASET
    demo.shrink_plans(preprocessed, "nnUNetPlans", demo.PLANS)
    plans = json.loads((preprocessed / f"{demo.PLANS}.json").read_text())
    network = plans["configurations"][demo.CONFIGURATION]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [2 * 2**i for i in range(network["n_stages"])]
    (preprocessed / f"{demo.PLANS}.json").write_text(json.dumps(plans))
    # Batches are loaded in the training process, and on one thread, so that its times are complete.
    return environment | {"nnUNet_compile": "f", "nnUNet_n_proc_DA": "0", "OMP_NUM_THREADS": "1"}


def _train_in_turn(
    folder: Path, environment: Mapping[str, str], rounds: int, console: Console
) -> dict[str, list[dict[str, Seconds]]]:
    """Return the wall and processor times of the parts of each training."""
    times: dict[str, list[dict[str, Seconds]]] = {trainer: [] for trainer in TRAINERS}
    order = list(TRAINERS)
    shuffle = random.Random(0).shuffle
    _train(TRAINERS[-1], folder, environment)  # compiles Numba's kernels and fills the caches of files
    for _ in range(rounds):
        shuffle(order)
        for trainer in order:
            measured = _train(trainer, folder, environment)
            times[trainer].append(measured)
            total = {clock: sum(parts.values()) for clock, parts in measured.items()}
            console.print(f"{trainer}: {total['wall']:.1f} s, {total['processor']:.1f} s processor time")
    return times


def _train(trainer: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Seconds]:
    file = folder / "times.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.training", "train", "901", demo.CONFIGURATION, "0"]
    command += ["-tr", trainer, "-p", demo.PLANS, "-device", "cpu"]
    before, start = os.times(), time.time()
    done = subprocess.run(
        command, env={**environment, _TIMES: str(file)}, capture_output=True, text=True, check=False
    )
    wall, after = time.time() - start, os.times()
    if done.returncode != 0:
        raise RuntimeError(f"{trainer}: exit status {done.returncode}: {done.stderr.strip()[-2000:]}")
    measured: dict[str, Seconds] = json.loads(file.read_text())
    total = {
        "wall": wall,
        # That of the processes that draw figures and write checkpoints included.
        "processor": after.children_user + after.children_system
        - before.children_user - before.children_system,
    }  # fmt: skip
    for clock, parts in measured.items():
        parts[EXIT] = total[clock] - sum(parts.values())
    return measured


def _table(clock: str, times: Mapping[str, Sequence[Mapping[str, Seconds]]]) -> Table:
    """Return the medians of the parts in seconds."""
    rounds = len(next(iter(times.values())))
    table = Table(title=f"{clock} time of {EPOCHS} epochs of {ITERATIONS} steps, s, median of {rounds}")
    table.add_column("")
    for trainer in times:
        table.add_column(trainer, justify="right")
    for part in PARTS:
        row = [statistics.median(each[clock][part] for each in own) for own in times.values()]
        table.add_row(part, *(f"{seconds:.2f}" for seconds in row))
    sums = [[sum(each[clock].values()) for each in own] for own in times.values()]
    table.add_row("sum", *(f"{statistics.median(own):.1f}" for own in sums))
    ratios = [statistics.median(s / base for s, base in zip(own, sums[0])) for own in sums]
    table.add_row(f"sum / {STOCK}", *(f"{ratio:.3f}" for ratio in ratios))
    return table


def _limits(times: Mapping[str, Sequence[Mapping[str, Seconds]]]) -> list[tuple[Limit, float]]:
    limits = []
    for trainer, measured in times.items():
        if trainer == STOCK:
            continue
        pairs = [(own["processor"], base["processor"]) for own, base in zip(measured, times[STOCK])]
        outside = statistics.median(_outside(own) / _outside(base) for own, base in pairs)
        start = statistics.median(own[START] - base[START] for own, base in pairs)
        limits += [
            (Limit(f"{trainer}: outside the steps / {STOCK}", 0.8, aim=1.01), outside),
            (Limit(f"{trainer}: start-up - {STOCK}'s, s", 2.2, aim=0.3), start),
        ]
    return limits


def _outside(parts: Mapping[str, float]) -> float:
    """Return the time from the first epoch on, without the training steps."""
    return sum(parts.values()) - parts[START] - parts[STEPS]


# In the process of a training


def _train_timed(arguments: list[str]) -> None:
    """Run nnU-Net's training command, and write the times of its parts."""
    import psutil

    begin_wall, begin_processor = psutil.Process().create_time(), 0.0
    from nnunetv2.run import run_training
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    clocks = {"wall": time.time, "processor": time.process_time}
    times: dict[str, Seconds] = {clock: dict.fromkeys(PARTS[:-1], 0.0) for clock in clocks}
    initialize, train = nnUNetTrainer.__init__, nnUNetTrainer.run_training
    nested: list[Seconds] = []

    @wraps(initialize)  # nnU-Net reads the signature
    def short(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self.num_epochs, self.num_iterations_per_epoch = EPOCHS, ITERATIONS
        self.num_val_iterations_per_epoch = VALIDATION_ITERATIONS

    def timed(method: Any, part: str, *args: Any, **kwargs: Any) -> Any:
        begin = {clock: read() for clock, read in clocks.items()}
        nested.append(dict.fromkeys(clocks, 0.0))
        try:
            return method(*args, **kwargs)
        finally:
            inner = nested.pop()
            for clock, read in clocks.items():
                spent = read() - begin[clock]
                times[clock][part] += spent - inner[clock]  # without the methods that it called
                if nested:
                    nested[-1][clock] += spent

    def run_timed(self: Any) -> None:
        times["wall"][START] += time.time() - begin_wall
        times["processor"][START] += time.process_time() - begin_processor
        for name, part in _METHODS.items():
            setattr(self, name, partial(timed, getattr(self, name), part))
        train(self)

    nnUNetTrainer.__init__, nnUNetTrainer.run_training = short, run_timed
    sys.argv = ["nnUNetv2_train", *arguments]
    run_training.run_training_entry()
    Path(os.environ[_TIMES]).write_text(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        _train_timed(sys.argv[2:])
    else:
        app()
