"""Do the commands answer at once? For users: ``python -m benchmarks.command_time``."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.large_study import COMMAND, NAME, Cost, RepeatsOption, Size, measure, write_study
from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import machine

TORCH, NNUNET = "import torch", "nnU-Net's search for nnUNetTrainerCPR"
REFERENCES = {
    TORCH: TORCH,
    NNUNET: "from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name as find; "
    "find('nnUNetTrainerCPR')",
}
COMMANDS = {
    "--help": (TORCH, 0.2),
    "trainers": (TORCH, 0.25),
    "study list": (TORCH, 0.35),
    "study status STUDY": (TORCH, 0.4),
    "study run MISSPELT": (NNUNET, 1.2),
    "vision run MISSPELT SGD": (TORCH, 1.4),
    "trainers nnUNetTrainerCPR_ws2000": (NNUNET, 1.1),
    "doctor": (NNUNET, 1.25),
}
"""Reference of each command, and the largest accepted ratio of its processor time.

Commands without torch and nnU-Net are to answer within half a second, where the import of torch takes
two. The others cannot be faster than the import that they need.
"""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    repeats: RepeatsOption = 3,
    checks: CheckOption = False,
) -> None:
    """Time the commands in turn, each in a process of its own, and compare them with imports."""
    console = Console(width=110)
    console.print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    with TemporaryDirectory() as folder:
        costs = _costs(Path(folder), repeats)
    table = Table(title=f"smallest of {repeats} measurements")
    table.add_column("")
    for heading in ("processor time, s", "wall time, s"):
        table.add_column(heading, justify="right")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.cpu:.2f}", f"{cost.wall:.2f}")
    console.print(table)
    limits = [
        (Limit(f"{name} / {reference}", maximum), costs[name].cpu / costs[reference].cpu)
        for name, (reference, maximum) in COMMANDS.items()
    ]
    if not check_limits(limits, console) and checks:
        raise typer.Exit(1)


def _costs(folder: Path, repeats: int) -> dict[str, Cost]:
    environment = write_study(folder, Size(trainers=10, epochs=50))
    study, misspelt = folder / f"{NAME}.yaml", folder / "misspelt.yaml"
    misspelt.write_text(study.read_text().replace("nnUNetTrainerCPR_ws100\n", "nnUNetTrainerCRP\n"))
    paths = {"STUDY": str(study), "MISSPELT": str(misspelt)}
    processes = {name: ([sys.executable, "-c", code], 0) for name, code in REFERENCES.items()}
    for name in COMMANDS:
        words = [paths.get(word, word) for word in name.split()]
        processes[name] = [*COMMAND, *words], int("MISSPELT" in name)
    costs: dict[str, list[Cost]] = {name: [] for name in processes}
    for _ in range(repeats):
        for name, (arguments, status) in processes.items():
            costs[name].append(measure(arguments, environment, status)[0])
    return {
        name: Cost(min(each.cpu for each in own), min(each.wall for each in own))
        for name, own in costs.items()
    }


if __name__ == "__main__":
    app()
