"""``nnunet-cpr doctor``: check the installation."""

from __future__ import annotations

from nnunet_cpr.cli._errors import stop


def doctor() -> None:
    """Say whether everything fits together; exit status 1 when something is wrong."""
    from rich.console import Console

    from nnunet_cpr.nnunet.doctor import examine

    console = Console(highlight=False)
    wrong = 0
    for finding in examine():
        mark = "[red]wrong[/red]" if finding.remedy else "[green]ok[/green]   "
        console.print(f"{mark} [bold]{finding.subject}[/bold]", end=": ")
        console.print(finding.what, markup=False, soft_wrap=True)
        if finding.remedy:
            wrong += 1
            console.print(f"      run: {finding.remedy}", markup=False, soft_wrap=True)
    if wrong:
        stop(f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong, see above")
