"""Files and folders that appear whole or not at all, and what others have left read with suspicion."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".nnunet-cpr-writing-"
"""What the names of folders begin with that are being written: nnU-Net and its users pass over it."""

_A_DAY = 24 * 60 * 60


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` on success.

    The content is on the disk before it takes the place (``fsync``): file systems may write the new name
    down first, and a power cut between the two would leave an empty file where there was a good one.
    That costs a millisecond, or for a checkpoint as long as the disk takes to write it, and is worth it.
    The folder is not synchronized: at worst the old file is there again.

    What processes that were killed have left of this file is removed first.

    Raises:
        OSError: it cannot be written; the error names ``path``, which is as it was.
    """
    writer = f"{os.getpid()}-{socket.gethostname()}"
    temporary = path.with_name(f"{_beginning(path)}{writer}.writing{path.suffix}")
    try:
        _remove_abandoned(path)
        yield temporary
        with open(temporary, "r+b") as file:  # Windows flushes only what may be written
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        about = str(error.filename)  # None where writing failed, not opening
        if error.errno is None or about not in ("None", str(temporary), str(path.parent)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if os.path.lexists(temporary):
            temporary.unlink()


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder to make, in a temporary one beside ``target`` whose place it takes on success.

    What processes that were killed have left there is removed first.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    for left in target.parent.glob(f"{UNFINISHED}*"):
        with _locked(left) as abandoned:
            if abandoned:
                shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=target.parent))
    try:
        with _locked(temporary):
            yield temporary / target.name
            os.replace(temporary / target.name, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_with_torch(content: Any, path: Path) -> None:
    """``torch.save`` into a file that appears whole or not at all.

    Raises:
        OSError: it cannot be written; the error names ``path``, which is as it was.
    """
    import torch

    with replacing(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # Its zip writer says "unexpected pos" where the disk is full.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def read_json(path: Path) -> Any:
    """What a JSON file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite_number(value: Any) -> float | None:
    """Return a number that was read from a file as a float, or None for everything else.

    Python's JSON parser accepts NaN, Infinity, and integers that are too large for a float. All of them
    count as missing.
    """
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error that does not say which file or folder it is about gets this one.

    Raises:
        OSError: as it came, with a path.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _beginning(path: Path) -> str:
    return f".{path.stem[:60]}."  # a name may be as long as can be already


def _remove_abandoned(path: Path) -> None:
    ours = re.compile(re.escape(_beginning(path)) + r"(\d+)-(.+)\.writing" + re.escape(path.suffix))
    for name in os.listdir(path.parent):
        left, match = path.with_name(name), ours.fullmatch(name)
        if match and _is_abandoned(left, int(match[1]), match[2]):
            left.unlink(missing_ok=True)


def _is_abandoned(temporary: Path, pid: int, host: str) -> bool:
    """Whether the process that wrote it is gone: what another machine's does shows in the time alone."""
    if host == socket.gethostname() and os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass
    try:
        return time.time() - temporary.stat().st_mtime > _A_DAY
    except FileNotFoundError:
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether this process could lock the folder. The system ends the lock with the process."""
    if sys.platform == "win32":
        yield False  # without locks of folders, those of killed runs stay
        return
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False  # its own process has removed it meanwhile
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process's; or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
