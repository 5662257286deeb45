"""``nnunet-cpr export``: a trained model for plain nnU-Net."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.cli._errors import stop


def export(
    model_folder: Annotated[
        Path,
        typer.Argument(help="The trained model: TRAINER__PLANS__CONFIGURATION in nnUNet_results."),
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder for the copy, laid out as nnUNet_results.")
    ] = Path("exported"),
    folds: Annotated[
        str | None, typer.Option(help="Such as 0,1,2 or all; without it every fold that is there.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as checkpoint_best.pth, instead of checkpoint_final.pth; may be repeated."
        ),
    ] = None,
) -> None:
    """Copy a trained model so that nnU-Net predicts with it where nnunet-cpr is not installed."""
    import shlex

    from nnunet_cpr.nnunet.checkpoints import UnusableCheckpoint
    from nnunet_cpr.nnunet.export import ExportError
    from nnunet_cpr.nnunet.export import export as export_model

    names = checkpoint or ["checkpoint_final.pth"]
    try:
        copy = export_model(model_folder, output, folds.split(",") if folds else None, names)
    except (ExportError, UnusableCheckpoint, OSError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted; nothing was written", status=130)
    written = sorted(copy.glob("fold_*"))
    size = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file()) / 1e6
    print(f"{copy}: {', '.join(fold.name for fold in written)}, {size:,.1f} MB. Predict with it:")
    options = [] if names == ["checkpoint_final.pth"] else ["-chk", names[0]]
    arguments = ["-m", str(copy), "-f", *(fold.name.removeprefix("fold_") for fold in written), *options]
    print(f"  nnUNetv2_predict_from_modelfolder {shlex.join(arguments)} -i IMAGES -o SEGMENTATIONS")
