"""``nnunet-cpr trainers``: list the trainers, or explain a name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from nnunet_cpr.cli._errors import report_errors, stop
from nnunet_cpr.cli._options import JsonOption, print_json


def trainers(
    name: Annotated[
        str | None,
        typer.Argument(help="Name to explain, such as nnUNetTrainerCPR_ws2000_on_nnUNetTrainerDA5."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the trainers and suffixes, or explain what the trainer of a name does."""
    from nnunet_cpr._spelling import NUMBER_HELP, OTHER_TRAINER
    from nnunet_cpr.names import WrongName
    from nnunet_cpr.names.families import FAMILIES
    from nnunet_cpr.names.suffixes import SUFFIXES

    if name is None:
        print("families")
        _print_pairs([(family.name, family.title) for family in FAMILIES.values()])
        print(f"suffixes, {NUMBER_HELP}")
        last = (f"{OTHER_TRAINER}<Trainer>", "like another trainer; the last suffix")
        _print_pairs([*((suffix.syntax, suffix.meaning) for suffix in SUFFIXES), last])
        return
    if name in FAMILIES and FAMILIES[name].optimizer == "timm":
        from nnunet_cpr.integrations import from_timm

        rows = []
        for optimizer in from_timm.list_names():
            refusal = from_timm.refusal(optimizer)
            text = f"no: {refusal}" if refusal else from_timm.describe(optimizer)
            rows.append((f"{name}_{optimizer}", text))
        _print_pairs(rows)
        return
    with report_errors(WrongName):
        with Console(stderr=True).status("building the trainer"):
            from nnunet_cpr.nnunet.tools.explanation import NEVER, explain

            explained = explain(name)
        if as_json:
            print_json(dict(explained))
        else:
            _print_pairs(explained)
        if NEVER in dict(explained).get("bound", ""):
            stop(f"{name}: no matrix is regularized, see the bound above")


def _print_pairs(rows: list[tuple[str, str]]) -> None:
    table = Table(Column(no_wrap=True), Column(overflow="fold"), box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
