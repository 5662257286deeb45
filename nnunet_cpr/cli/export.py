"""``nnunet-cpr export``: convert a trained model for plain nnU-Net."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.cli._errors import report_errors
from nnunet_cpr.cli._options import parse_numbers


def export(
    model_folder: Annotated[
        Path,
        typer.Argument(help="Trained model: TRAINER__PLANS__CONFIGURATION in nnUNet_results."),
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
    import shlex

    from nnunet_cpr.names import WrongName
    from nnunet_cpr.nnunet.checkpoints import UnusableCheckpoint
    from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
    from nnunet_cpr.nnunet.tools.export import ExportError, export_model

    names = checkpoint or [FINAL_CHECKPOINT]
    # Of nnU-Net's fold "all", not all folds.
    selected = [folds] if folds == "all" else [*map(str, parse_numbers("--folds", folds))]
    expected = (ExportError, UnusableCheckpoint, WrongName, OSError)
    with report_errors(*expected, interrupted="interrupted; nothing was written"):
        copy = export_model(model_folder, output, selected or None, names)
    exported = sorted(fold.name.removeprefix("fold_") for fold in copy.glob("fold_*"))
    options = [] if names == [FINAL_CHECKPOINT] else ["-chk", names[0]]
    arguments = shlex.join(["-m", str(copy), "-f", *exported, *options])
    print(f"{copy}: exported. Predict with it:")
    print(f"  nnUNetv2_predict_from_modelfolder {arguments} -i IMAGES -o SEGMENTATIONS")
