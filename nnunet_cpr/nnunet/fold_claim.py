"""Claim of a fold's folder by the process that trains in it, and the request that it ends early."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from nnunet_cpr.nnunet.processes import process_start
from nnunet_cpr.refusals import Refusal

CLAIM = ".training_process"
"""File with the host, process id and start of the process that trains in the folder."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim a folder for this process.

    A claim holds while its process is alive, so that one that was killed leaves none. (A lock of the
    operating system would be inherited by the data loaders, which may outlive the training.) Processes
    of other machines cannot be asked; their claims are replaced. Two that start at the same moment may
    both get the folder.

    Raises:
        Refusal: another process of this machine trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_if_claimed(folder)
    path, own = folder / CLAIM, describe_process(os.getpid())
    path.write_text(own)
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == own:  # not that of another machine
                path.unlink()


def refuse_if_claimed(folder: Path) -> None:
    """Refuse a folder in which another process trains, before anything in it changes.

    Raises:
        Refusal: another process of this machine trains there.
    """
    with suppress(OSError):
        holder = (folder / CLAIM).read_text()
        if holder != describe_process(os.getpid()) and _is_alive(holder):
            pid = holder.split()[1]
            raise Refusal(f"process {pid} trains in {folder}", f"wait for it, or end it: kill {pid}")


def running_process(folder: Path) -> str | None:
    """Return the description of the process that trains in a folder, None if there is none.

    One of another machine, which cannot be asked, may have ended.
    """
    try:
        holder = (folder / CLAIM).read_text()
    except OSError:
        return None
    return holder if _is_alive(holder) or not is_of_this_machine(holder) else None


def is_of_this_machine(process: str) -> bool:
    """Return True if a description is that of a process of this machine."""
    return process.partition(" ")[0] == socket.gethostname()


def describe_process(pid: int) -> str:
    """Return the host, process id and start of a process of this machine."""
    return f"{socket.gethostname()} {pid} {process_start(pid)}"


def _is_alive(holder: str) -> bool:
    try:
        return describe_process(int(holder.split()[1])) == holder
    except (IndexError, ValueError, psutil.Error):  # it has ended, or the file is no claim
        return False


REQUEST = ".finish_after_epoch"
"""File that asks the training to end. One that is continued after a signal still ends, as it was asked
to; one that begins anew removes it."""


def request_finish(fold: Path) -> str:
    """Ask the training in a fold's folder to end after its running epoch.

    Args:
        fold: such as ``nnUNetTrainerCPR_anytime__nnUNetPlans__3d_fullres/fold_0``.

    Returns:
        The process in words. One of another machine, which cannot be asked, may have ended.

    Raises:
        Refusal: no training of this package runs there.
        OSError: the request cannot be written.
    """
    process = running_process(fold)
    if process is None:
        raise Refusal(
            f"{fold}: expected a fold that nnunet-cpr trains now, got a folder without a running "
            "training",
            "to train longer than a finished one, use nnunet-cpr extend",
        )
    (fold / REQUEST).write_text(process)
    host, number, _ = process.split()
    return f"process {number} of {host}"


def is_finish_requested(fold: Path) -> bool:
    """Return True if the training of a fold has been asked to end."""
    return (fold / REQUEST).exists()


def withdraw_request(fold: Path) -> None:
    """Remove a request, after the training, or as another one begins."""
    (fold / REQUEST).unlink(missing_ok=True)
