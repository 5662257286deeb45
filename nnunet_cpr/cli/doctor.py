"""``nnunet-cpr doctor``: check the installation and the optimizers' steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nnunet_cpr.cli._errors import stop

if TYPE_CHECKING:
    from rich.console import Console


def doctor(
    device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu: check the optimizers' steps there and time them, in a minute."),
    ] = None,
) -> None:
    """Check the installation, or with --device the steps; exit status 1 if there is a problem."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    problems = _check_installation(console) if device is None else _check_steps(console, device)
    if problems:
        stop(f"{problems} problem{'s' if problems > 1 else ''} found, see above")


def _check_installation(console: Console) -> int:
    """Print a command for each problem and return their number."""
    from nnunet_cpr.nnunet.tools.doctor import check_installation

    problems = 0
    for finding in check_installation():
        mark = "[red]wrong[/red]" if finding.remedy else "[green]ok[/green]   "
        console.print(f"{mark} [bold]{finding.subject}[/bold]", end=": ")
        console.print(finding.message, markup=False)
        if finding.remedy:
            problems += 1
            console.print(f"      run: {finding.remedy}", markup=False)
    return problems


def _check_steps(console: Console, name: str) -> int:
    """Print a text for a report of a problem, and return the number of wrong steps."""
    if name not in ("cpu", "cuda"):
        stop(f"--device: expected cuda or cpu, got {name!r}")
    import torch

    from nnunet_cpr.nnunet.tools.step_check import check_steps, describe_environment, step_ratios

    if name == "cuda" and not torch.cuda.is_available():
        stop("--device: torch finds no CUDA device; run nnunet-cpr doctor for the reason")
    device = torch.device(name)
    console.print("```")
    for line in describe_environment(device):
        console.print(line, markup=False)
    console.print(f"{'':18} {'step':8} difference")
    problems = 0
    for result in check_steps(device):
        problems += bool(result.problem)
        console.print(str(result), markup=False)
    for optimizer, ratio in step_ratios(device).items():
        console.print(f"{optimizer} for nnU-Net's 31 M parameters: {ratio:.2f} of torch's fused step")
    console.print("```")
    console.print("If something is wrong, or on a device that is new here, paste this into an issue.")
    return problems
