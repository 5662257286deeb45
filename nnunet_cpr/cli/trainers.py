"""``nnunet-cpr trainers``, ``finish``, ``extend`` and ``export``: trainers by name, and trainings."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from nnunet_cpr.cli.options import JsonOption, parse_numbers, print_json
from nnunet_cpr.refusals import Refusal


def trainers(
    name: Annotated[
        str | None,
        typer.Argument(help="Name to explain, such as nnUNetTrainerCPR_ws2000_on_nnUNetTrainerDA5."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the trainers and suffixes, or explain what the trainer of a name does."""
    from nnunet_cpr.names.families import FAMILIES
    from nnunet_cpr.names.trainer_name import suffix_table
    from nnunet_cpr.names.training import NEVER
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
    with Console(stderr=True).status("building the trainer"):
        from nnunet_cpr.nnunet.tools.explain_name import explain

        explained = explain(name)
    if as_json:
        print_json(dict(explained))
    else:
        _print_explanation(explained)
    if NEVER in dict(explained).get("bound", ""):
        raise Refusal(f"{name}: no matrix is regularized, see the bound above")


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


def finish(
    fold_folder: Annotated[
        Path, typer.Argument(help="Fold that is trained now: TRAINER__PLANS__CONFIGURATION/fold_0.")
    ],
) -> None:
    """End a training after its running epoch, with its validation and final checkpoint."""
    from nnunet_cpr.nnunet.fold_files import read_progress
    from nnunet_cpr.nnunet.processes import request_finish
    from nnunet_cpr.nnunet.run_record import record_of

    process = request_finish(fold_folder)
    done, epochs = read_progress(fold_folder)[0], record_of(fold_folder).training.get("epochs", "?")
    print(
        f"{fold_folder}: {done} of {epochs} epochs done; asked {process} to end after the running "
        "epoch, and to validate"
    )


def extend(
    model_folder: Annotated[
        Path, typer.Argument(help="Shorter training: TRAINER__PLANS__CONFIGURATION in nnUNet_results.")
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs of the longer training.")],
) -> None:
    """Make the folder of a longer training from a shorter one, and print the command that trains on."""
    from nnunet_cpr.nnunet.tools.extend import extend_model

    def report(message: str) -> None:
        print(f"nnunet-cpr: {message}", file=sys.stderr)

    longer, folds = extend_model(model_folder, epochs, report)
    trainer, plans, configuration = longer.name.split("__")
    print(f"{longer}: has the epochs so far. Train on:")
    for fold in folds:
        command = ["nnUNetv2_train", longer.parent.name, configuration, fold, "-tr", trainer]
        print(f"  {shlex.join([*command, '-p', plans, '--c'])}")


def export(
    model_folder: Annotated[
        Path, typer.Argument(help="Trained model: TRAINER__PLANS__CONFIGURATION in nnUNet_results.")
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder for the copy, with the layout of nnUNet_results.")
    ] = Path("exported"),
    folds: Annotated[
        str | None,
        typer.Option("--folds", "-f", help="Folds such as 0-2, or all; by default every existing fold."),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            "-chk",
            help="Checkpoint such as checkpoint_best.pth, checkpoint_final.pth by default; repeatable.",
        ),
    ] = None,
) -> None:
    """Copy a trained model so that nnU-Net can predict with it where nnunet-cpr is not installed."""
    from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
    from nnunet_cpr.nnunet.tools.export import export_model

    names = checkpoint or [FINAL_CHECKPOINT]
    # Of nnU-Net's fold "all", not all folds.
    selected = [folds] if folds == "all" else [*map(str, parse_numbers("--folds", folds))]
    copy = export_model(model_folder, output, selected or None, names)
    exported = sorted(fold.name.removeprefix("fold_") for fold in copy.glob("fold_*"))
    options = [] if names == [FINAL_CHECKPOINT] else ["-chk", names[0]]
    arguments = shlex.join(["-m", str(copy), "-f", *exported, *options])
    print(f"{copy}: exported. Predict with it:")
    print(f"  nnUNetv2_predict_from_modelfolder {arguments} -i IMAGES -o SEGMENTATIONS")
