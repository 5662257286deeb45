"""Digest of a data set that does not depend on its location."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

_SAMPLES, _BYTES = 16, 2**16


def data_files(root: Path, folders: Sequence[str], suffix: str = "") -> list[str]:
    """Return the sorted paths of the files with this suffix in folders of ``root``, relative to it.

    Hidden files are left out, because file managers create some.
    """
    names = []
    for folder in folders:
        for path, _, files in os.walk(root / folder, followlinks=True):
            inside = Path(os.path.relpath(path, root)).as_posix()
            names += [f"{inside}/{f}" for f in files if not f.startswith(".") and f.endswith(suffix)]
    return sorted(names)


def data_digest(root: Path, folders: Sequence[str], suffix: str = "") -> str | None:
    """Return the number of these files (:func:`data_files`) and a hash, or None without files.

    The hash covers the names of all files and the sizes and first bytes of a few, because reading all
    of ImageNet takes hours.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "train").mkdir()
        >>> (root / "train" / "1.txt").write_text("one")
        3
        >>> data_digest(root, ["train"])
        '1 files (517689d0)'
    """
    names = data_files(root, folders, suffix)
    if not names:
        return None
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape"))
    for name in names[:: -(-len(names) // _SAMPLES)]:
        with open(root / name, "rb") as file:
            digest.update(file.read(_BYTES))
            digest.update(str(os.fstat(file.fileno()).st_size).encode())
    return f"{len(names)} files ({digest.hexdigest()[:8]})"
