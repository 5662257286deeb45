"""Request to a running training to end after its running epoch."""

from __future__ import annotations

import os
from pathlib import Path

from nnunet_cpr.nnunet.fold_claim import describe_process, running_process

REQUEST = ".finish_after_epoch"
"""File with the process that shall end; one that was started later ignores it."""


class NotTraining(RuntimeError):
    """Folder in which no training runs; the message is one line."""


def request_finish(fold: Path) -> str:
    """Ask the training in a fold's folder to end after its running epoch.

    Args:
        fold: such as ``nnUNetTrainerCPR_anytime__nnUNetPlans__3d_fullres/fold_0``.

    Returns:
        The process in words. One of another machine, which cannot be asked, may have ended.

    Raises:
        NotTraining: no training of this package runs there.
        OSError: the request cannot be written.
    """
    process = running_process(fold)
    if process is None:
        raise NotTraining(
            f"{fold}: expected a fold that nnunet-cpr trains now, got a folder without a running "
            "training; to train longer than a finished one, use nnunet-cpr extend"
        )
    (fold / REQUEST).write_text(process)
    host, number, _ = process.split()
    return f"process {number} of {host}"


def is_finish_requested(fold: Path) -> bool:
    """Return True if this process has been asked to end."""
    try:
        return (fold / REQUEST).read_text() == describe_process(os.getpid())
    except FileNotFoundError:
        return False


def withdraw_request(fold: Path) -> None:
    """Remove a request, after the training."""
    (fold / REQUEST).unlink(missing_ok=True)
