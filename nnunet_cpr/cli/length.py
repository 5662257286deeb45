"""``nnunet-cpr finish`` and ``nnunet-cpr extend``: change the length of a training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.cli._errors import report_errors


def finish(
    fold_folder: Annotated[
        Path,
        typer.Argument(help="Fold that is trained now: TRAINER__PLANS__CONFIGURATION/fold_0."),
    ],
) -> None:
    """End a training after its running epoch, with its validation and final checkpoint."""
    from nnunet_cpr.nnunet.fold_claim import NotTraining, request_finish

    with report_errors(NotTraining, OSError):
        process = request_finish(fold_folder)
    print(f"{fold_folder}: asked {process} to end after the running epoch, and to validate")


def extend(
    model_folder: Annotated[
        Path,
        typer.Argument(help="Shorter training: TRAINER__PLANS__CONFIGURATION in nnUNet_results."),
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs of the longer training.")],
) -> None:
    """Make the folder of a longer training from a shorter one, and print the command that trains on."""
    import shlex

    from nnunet_cpr.names import WrongName
    from nnunet_cpr.nnunet.checkpoints import UnusableCheckpoint
    from nnunet_cpr.nnunet.tools.extension import CannotExtend, extend_model

    def report(message: str) -> None:
        print(f"nnunet-cpr: {message}", file=sys.stderr)

    with report_errors(CannotExtend, UnusableCheckpoint, WrongName, OSError):
        longer, folds = extend_model(model_folder, epochs, report)
    trainer, plans, configuration = longer.name.split("__")
    print(f"{longer}: has the epochs so far. Train on:")
    for fold in folds:
        command = ["nnUNetv2_train", longer.parent.name, configuration, fold, "-tr", trainer]
        print(f"  {shlex.join([*command, '-p', plans, '--c'])}")
