"""All tests and benchmarks of a GPU in one call: ``python -m benchmarks.gpu OUTPUT``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer


def main(output: Annotated[Path, typer.Argument(help="Folder for the tables and the figure.")]) -> None:
    """Run the GPU tests and benchmarks with their limits; exit with 1 if any of them fails."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is available")
    output.mkdir(parents=True, exist_ok=True)
    device = ["--device", "cuda", "--output", str(output)]
    commands = {
        "tests": ["-m", "pytest", "-q", "tests/fused", "tests/test_gpu.py"],
        "limits": ["-m", "benchmarks.step_time", "--device", "cuda", "--check"],
        "step_time": ["-m", "benchmarks.step_time", *device],
        "train_step": ["-m", "benchmarks.train_step", *device, "--check", "--no-compiled"],
        "checkpointing": ["-m", "benchmarks.checkpointing", *device, "--check", "--no-compiled"],
    }
    failed = []
    for name, command in commands.items():
        print(f"== python {' '.join(command)}", flush=True)
        process = subprocess.run(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        (output / f"{name}.log").write_text(process.stdout)
        print(process.stdout, flush=True)
        if process.returncode != 0:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "all passed")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
