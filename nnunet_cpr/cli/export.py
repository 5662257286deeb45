"""``nnunet-cpr export``: convert a trained model for plain nnU-Net."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.cli._errors import report_errors


def export(
    model_folder: Annotated[
        Path,
        typer.Argument(help="Trained model: TRAINER__PLANS__CONFIGURATION in nnUNet_results."),
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder for the copy, with the layout of nnUNet_results.")
    ] = Path("exported"),
    folds: Annotated[
        str | None, typer.Option(help="Folds such as 0,1,2 or all; by default every existing fold.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Checkpoint such as checkpoint_best.pth, checkpoint_final.pth by default; repeatable."
        ),
    ] = None,
) -> None:
    """Copy a trained model so that nnU-Net can predict with it where nnunet-cpr is not installed."""
    import shlex

    from nnunet_cpr.nnunet.checkpoints import UnusableCheckpoint
    from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
    from nnunet_cpr.nnunet.tools.export import ExportError, export_model

    names = checkpoint or [FINAL_CHECKPOINT]
    with report_errors(
        ExportError, UnusableCheckpoint, OSError, interrupted="interrupted; nothing was written"
    ):
        copy = export_model(model_folder, output, folds.split(",") if folds else None, names)
    written = sorted(copy.glob("fold_*"))
    size = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file()) / 1e6
    print(f"{copy}: {', '.join(fold.name for fold in written)}, {size:,.1f} MB. Predict with it:")
    options = [] if names == [FINAL_CHECKPOINT] else ["-chk", names[0]]
    arguments = ["-m", str(copy), "-f", *(fold.name.removeprefix("fold_") for fold in written), *options]
    print(f"  nnUNetv2_predict_from_modelfolder {shlex.join(arguments)} -i IMAGES -o SEGMENTATIONS")
