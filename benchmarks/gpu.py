"""Does everything work, and how fast, on a GPU? For a release: ``python -m benchmarks.gpu OUTPUT``.

They take some 15 minutes. Where a machine is lent for less at a time, choose steps with ``--step``. The
study on real data goes on where it stopped when the command is called again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

_DEVICE = ["--device", "cuda", "--output", "OUTPUT", "--check"]
_CLI = ["-c", "from nnunet_cpr.cli import main; main()"]
_TRAIN_STEP = ["-m", "benchmarks.train_step", *_DEVICE, "--seconds", "20"]
_TESTS = ["tests/optimizers/fused", "tests/test_gpu.py"]
STEPS = {
    "doctor": [*_CLI, "doctor", "--device", "cuda"],
    "tests": ["-m", "pytest", "-q", "-n", "4", "--dist", "loadfile", *_TESTS],
    "step_time": ["-m", "benchmarks.step_time", *_DEVICE, "--seconds", "3", "--no-sweeps"],
    "train_step": [*_TRAIN_STEP, "--no-compiled"],
    "train_step_compiled": _TRAIN_STEP,
    "muon_cost": ["-m", "benchmarks.muon_cost", *_DEVICE, "--seconds", "10", "--no-compiled"],
}
STUDY = "study"
DEFINITION = Path(__file__).parent / "real_data" / "studies" / "gpu.yaml"
_KEPT = ("summary.json", "cpr_*", "progress.png", "training_log_*", "resources.json")


def main(
    output: Annotated[Path, typer.Argument(help="Folder for the tables, figures and logs.")],
    step: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this step, of {', '.join(STEPS)}, {STUDY}; may be repeated."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Task04_Hippocampus as downloaded; without it, no study.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time after which the study is interrupted.")] = 9.0,
) -> None:
    """Run the tests and benchmarks of a GPU, with their limits, and a study on real MRI.

    Exits with 1 if a test fails or a limit is exceeded, and with 3 if the study is not finished.
    """
    unknown = set(step or []) - {*STEPS, STUDY}
    if unknown:
        raise typer.BadParameter(
            f"unknown step {unknown.pop()!r}; choose from {', '.join([*STEPS, STUDY])}"
        )
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is available")
    chosen = step or [*STEPS, *([STUDY] if data is not None else [])]
    output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in chosen:
        if name == STUDY:
            continue
        command = [str(output) if word == "OUTPUT" else word for word in STEPS[name]]
        print(f"== {name}: python {' '.join(command)}", flush=True)
        process = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        (output / f"{name}.log").write_text(process.stdout)
        print(process.stdout, flush=True)
        if process.returncode != 0:
            failed.append(name)
    finished = True
    if STUDY in chosen:
        if data is None:
            raise typer.BadParameter("--step study needs --data")
        finished = run_study(data, output, minutes, Path(tempfile.gettempdir()) / "nnunet-cpr-gpu")
    print("failed: " + ", ".join(failed) if failed else "all passed")
    if failed or not finished:
        raise typer.Exit(1 if failed else 3)


def run_study(
    data: Path,
    output: Path,
    minutes: float,
    work: Path,
    definition: Path = DEFINITION,
    device: str = "cuda",
) -> bool:
    """Prepare the data, and run or continue the study in a folder; return True if it is finished.

    Its small files are packed into ``study.tar.gz``.
    """
    environment = dict(os.environ)
    for name in ("raw", "preprocessed", "results"):
        environment[f"nnUNet_{name}"] = str(work / name)
        (work / name).mkdir(parents=True, exist_ok=True)
    cli = [sys.executable, "-W", "ignore", *_CLI]
    if not (work / "raw" / "Dataset004_Hippocampus" / "dataset.json").is_file():
        subprocess.run([*cli, "prepare", "hippocampus", str(data)], env=environment, check=True)
    end = time.monotonic() + 60 * minutes
    command = [*cli, "study", "run", str(definition), "--device", device, "--jobs", "2"]
    with subprocess.Popen(command, env=environment) as process:
        try:
            process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # the trainings write their last checkpoints
            process.wait()
    report = [*cli, "study", "report", str(definition)]
    if process.returncode == 0:
        subprocess.run(report, env=environment, check=True)
    results = work / "results"
    kept = {path for pattern in _KEPT for path in results.rglob(pattern)}
    kept |= {path for path in results.rglob("*") if path.suffix in (".html", ".csv", ".tex")}
    with tarfile.open(output / "study.tar.gz", "w:gz") as archive:
        for path in sorted(path for path in kept if path.is_file()):
            archive.add(path, path.relative_to(results))
    return process.returncode == 0


if __name__ == "__main__":
    typer.run(main)
