"""Atomic file writes and validated reads."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

TEMPORARY_PREFIX = ".nnunet-cpr-tmp-"
"""Prefix of temporary directories; nnU-Net ignores names that do not start with ``Dataset``."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces ``path`` on success.

    The content is synced to the disk before the rename, and the folder after it, so that a power cut
    leaves either the old file or the new one.

    Args:
        path: the file to write.

    Raises:
        OSError: the file cannot be written; the error names ``path``, which is unchanged.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write(folder / "result.txt") as temporary:
        ...     _ = temporary.write_text("done")
        >>> [file.name for file in folder.iterdir()]
        ['result.txt']
    """
    writer = f"{os.getpid()}@{socket.gethostname()}"
    # A name may have as many characters as the file system allows.
    temporary = path.with_name(f".{path.stem[:60]}.{writer}.tmp{path.suffix}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        about = str(error.filename)  # None where writing failed, not opening
        if error.errno is None or about not in ("None", str(temporary), str(path.parent)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if os.path.lexists(temporary):
            temporary.unlink()


def remove_temporary_files(folder: Path, *patterns: str) -> None:
    """Remove temporary files of :func:`atomic_write` for files that only this process may write.

    Args:
        folder: where the files are.
        patterns: glob patterns of their names without suffix, such as ``checkpoint_*``.
    """
    for pattern in patterns:
        for path in folder.glob(f".{pattern}.*@*.tmp*"):
            path.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename a file, so that nothing of a user is lost where another takes its place.

    Returns:
        The new path, whose name ends with ``.set-aside-<N>``.
    """
    names = (path.with_name(f"{path.name}.set-aside-{number}") for number in count(1))
    return path.rename(next(kept for kept in names if not kept.exists()))


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a path for a new directory, which is moved to ``target`` on success.

    Temporary directories of killed processes are removed first.

    Raises:
        OSError: the directory cannot be written; nothing is left of it.
    """
    from filelock import FileLock, Timeout  # not when nnU-Net imports the trainers

    for stale in target.parent.glob(f"{TEMPORARY_PREFIX}*"):
        # Suppressed: another process writes there, or has just removed it.
        with suppress(Timeout, OSError), FileLock(stale / ".lock", timeout=0):
            shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=target.parent))
    try:
        with FileLock(temporary / ".lock"):
            yield temporary / target.name
            os.replace(temporary / target.name, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def atomic_torch_save(content: Any, path: Path) -> None:
    """Save with ``torch.save`` through :func:`atomic_write`.

    Raises:
        OSError: the file cannot be written; the error names ``path``, which is unchanged.
    """
    import torch

    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # Its zip writer says "unexpected pos" where the disk is full.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None


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
def add_path_to_os_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file.

    Raises:
        OSError: the original error, with a path.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(path: Path) -> None:
    """Write a file or folder to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # Windows syncs no folders
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems sync no folders; the file in it is there.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
