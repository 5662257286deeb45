"""``nnunet-cpr doctor`` and ``demo``: check the installation, and train with and without CPR."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nnunet_cpr.cli.options import JsonOption, print_json
from nnunet_cpr.refusals import Refusal, counted


def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-device",
            help="cuda or cpu: check the optimizers' steps there and time them, in a minute.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the installation, or with --device the steps; exit status 1 if there is a problem."""
    problems = _check_installation(as_json) if device is None else _check_steps(device)
    if problems:
        raise Refusal(f"{counted(problems, 'problem')} found, see above")


def _check_installation(as_json: bool) -> int:
    """Print a command for each problem and return their number."""
    try:
        from nnunet_cpr.nnunet.tools.doctor import check_installation
    except (ImportError, OSError) as error:  # torch raises an OSError for a library that is missing
        package = (getattr(error, "name", None) or "torch").partition(".")[0]
        raise Refusal(f"{error}", f"run: pip install --upgrade --force-reinstall {package}") from error

    with Console(stderr=True).status("checking the installation"):
        findings = list(check_installation())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    for finding in [] if as_json else findings:
        word = "wrong" if finding.remedy else "open" if finding.is_open else "ok"
        print(f"{word:6}{finding.subject}: {finding.message}")
        if finding.remedy:
            print(f"      run: {finding.remedy}")
    return sum(finding.remedy is not None for finding in findings)


def _check_steps(name: str) -> int:
    """Print a text for a report of a problem, and return the number of wrong steps."""
    if name not in ("cpu", "cuda"):
        raise Refusal(f"--device: expected cuda or cpu, got {name!r}")
    import torch

    from nnunet_cpr.nnunet.tools.doctor import check_installation
    from nnunet_cpr.nnunet.tools.step_check import check_steps, step_times

    if name == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device: torch finds no CUDA device", "run nnunet-cpr doctor for the reason")
    device = torch.device(name)
    print("```")
    for finding in islice(check_installation(), 5):  # the versions and the GPU
        print(f"{finding.subject}: {finding.message}")
    print(f"{device}, {counted(torch.get_num_threads(), 'thread')}")
    print(f"{'':18} {'step':8} difference")
    problems = 0
    for result in check_steps(device):
        problems += bool(result.problem)
        print(result)
    for optimizer, (ours, torchs) in step_times(device).items():
        text = f"{optimizer} for nnU-Net's 31 M parameters"
        print(f"{text}: {ours:.3g} ms, torch's fused step {torchs:.3g} ms")
    print("```")
    print("If something is wrong, or on a device that is new here, paste this into an issue.")
    return problems


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="New folder to keep all files in; by default only the figures.")
    ] = None,
) -> None:
    """Train, validate and predict with and without CPR on synthetic data: a few minutes on a CPU."""
    from nnunet_cpr.demo import figures, keep_only, print_results, run_demo

    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refusal(f"--folder: expected a new or empty folder, got {folder}")
    where = folder or Path(tempfile.mkdtemp(prefix="nnunet-cpr-demo-"))
    where.mkdir(parents=True, exist_ok=True)
    console = Console()
    results = run_demo(where.resolve(), console)
    files = figures(results)
    if folder is None:
        files = keep_only(files, where.resolve())
    print_results(results, files, console)
