"""``nnunet-cpr doctor``: check the installation."""

from __future__ import annotations

from nnunet_cpr.cli._errors import stop


def doctor() -> None:
    """Check the installation and print a command for each problem; exit status 1 if there is one."""
    from rich.console import Console

    from nnunet_cpr.nnunet.doctor import check_installation

    console = Console(highlight=False)
    problems = 0
    for finding in check_installation():
        mark = "[red]wrong[/red]" if finding.remedy else "[green]ok[/green]   "
        console.print(f"{mark} [bold]{finding.subject}[/bold]", end=": ")
        console.print(finding.message, markup=False, soft_wrap=True)
        if finding.remedy:
            problems += 1
            console.print(f"      run: {finding.remedy}", markup=False, soft_wrap=True)
    if problems:
        stop(f"{problems} problem{'s' if problems > 1 else ''} found, see above")
