"""``nnunet-cpr trainers``: list the trainers, or explain a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nnunet_cpr.cli._errors import report_errors

if TYPE_CHECKING:
    from rich.console import Console


def trainers(
    name: Annotated[
        str | None,
        typer.Argument(help="Name to explain, such as nnUNetTrainerCPR_ws2000_on_nnUNetTrainerDA5."),
    ] = None,
) -> None:
    """List the trainers and suffixes, or explain what the trainer of a name does."""
    from rich.console import Console

    from nnunet_cpr.names import WrongName

    console = Console(highlight=False)
    if name is None:
        for title, rows in _lists():
            console.print(f"[bold]{title}[/bold]")
            _print_pairs(console, rows)
        return
    with report_errors(WrongName), console.status("searching"):
        from nnunet_cpr.nnunet.tools.explanation import explain

        rows = explain(name)
    _print_pairs(console, rows)


def _lists() -> list[tuple[str, list[tuple[str, str]]]]:
    from nnunet_cpr._spelling import NUMBER_HELP, OTHER_TRAINER
    from nnunet_cpr.names.trainer_name import FAMILIES, SUFFIXES

    families = [(family.name, family.title) for family in FAMILIES.values()]
    suffixes = [(suffix.syntax, suffix.meaning) for suffix in SUFFIXES]
    last = [(f"{OTHER_TRAINER}<Trainer>", "like another trainer; the last suffix")]
    return [
        ("families", families),
        (f"suffixes, {NUMBER_HELP}", suffixes + last),
    ]


def _print_pairs(console: Console, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for subject, text in rows:
        table.add_row(Text(subject), Text(text))
    console.print(table)
