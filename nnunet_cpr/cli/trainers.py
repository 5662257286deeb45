"""``nnunet-cpr trainers``: list the trainers, or explain a name."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
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
    from nnunet_cpr.names import WrongName
    from nnunet_cpr.names.settings import FAMILIES
    from nnunet_cpr.names.trainer_name import suffix_table
    from nnunet_cpr.spelling import NUMBER_HELP

    if name is None:
        print("families")
        _print_rows([(family.name, family.title) for family in FAMILIES.values()])
        print(f"suffixes, {NUMBER_HELP}")
        _print_rows(suffix_table())
        return
    if name in FAMILIES and FAMILIES[name].optimizer == "timm":
        from nnunet_cpr.integrations import from_timm

        rows = []
        for optimizer in from_timm.list_names():
            refusal = from_timm.refusal(optimizer)
            text = f"no: {refusal}" if refusal else from_timm.describe(optimizer)
            rows.append((f"{name}_{optimizer}", text))
        _print_rows(rows)
        return
    with report_errors(WrongName):
        with Console(stderr=True).status("building the trainer"):
            from nnunet_cpr.nnunet.tools.explanation import NEVER, explain

            explained = explain(name)
        if as_json:
            print_json(dict(explained))
        else:
            _print_explanation(explained)
        if NEVER in dict(explained).get("bound", ""):
            stop(f"{name}: no matrix is regularized, see the bound above")


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    others = (Column(overflow="fold") for _ in rows[0][1:])
    table = Table(Column(no_wrap=True), *others, box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _print_explanation(rows: Sequence[tuple[str, str]]) -> None:
    """Print labels and texts, and keep names in one line, so that they can be copied."""
    indent = max(len(label) for label, _ in rows) + 2
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for label, text in rows:
        wrapper.initial_indent = f"{label:<{indent}}"
        print(wrapper.fill(text))
