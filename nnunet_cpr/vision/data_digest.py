"""Digest of a data set that does not depend on its location."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

_SAMPLES, _BYTES = 16, 2**16


def data_digest(root: Path, folders: Sequence[str]) -> str | None:
    """Return the number of files in these folders of ``root`` and a hash, or None without files.

    The hash covers the names of all files and the sizes and first bytes of a few, because reading all
    of ImageNet takes hours. Hidden files are ignored, because file managers create some.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "train").mkdir()
        >>> (root / "train" / "1.txt").write_text("one")
        3
        >>> data_digest(root, ["train"])
        '1 files (517689d0)'
    """
    names = []
    for folder in folders:
        for path, _, files in os.walk(root / folder, followlinks=True):
            inside = Path(os.path.relpath(path, root)).as_posix()
            names += [f"{inside}/{file}" for file in files if not file.startswith(".")]
    if not names:
        return None
    names.sort()
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape"))
    for name in names[:: -(-len(names) // _SAMPLES)]:
        with open(root / name, "rb") as file:
            digest.update(file.read(_BYTES))
            digest.update(str(os.fstat(file.fileno()).st_size).encode())
    return f"{len(names)} files ({digest.hexdigest()[:8]})"
