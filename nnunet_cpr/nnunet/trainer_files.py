"""Files in which nnU-Net searches for trainers."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import nnunet_cpr

EXTERNAL_TRAINERS = "nnUNet_extTrainer"
"""Environment variable with the folders that nnU-Net searches after its own."""

COMPILED = (".so", ".pyd", ".pyc")
_DYNAMIC = re.compile(r"import \*|__getattr__|\b(setattr|globals|vars|exec|eval)\(")
"""Code that may bind names which are not in the text of a module."""


def family_file(family: str) -> Path:
    """Return the file that defines a trainer family of this package."""
    parent = Path(nnunet_cpr.__file__).parents[1]
    # "nnunet_cpr_trainers" in an installed wheel, "trainers" in a checkout.
    files = [parent / folder / f"{family}.py" for folder in ("nnunet_cpr_trainers", "trainers")]
    return next(path for path in files if path.is_file())


def external_folders() -> list[Path]:
    """Return the folders listed in ``nnUNet_extTrainer``."""
    folders = os.environ.get(EXTERNAL_TRAINERS, "").split(os.pathsep)
    return [Path(folder) for folder in folders if folder.strip()]


def searched_files() -> Iterator[Path]:
    """Yield the modules that nnU-Net searches, except the families of this package."""
    spec = importlib.util.find_spec("nnunetv2")
    packages = (spec.submodule_search_locations or []) if spec is not None else []
    own = [Path(package) / "training" / "nnUNetTrainer" for package in packages]
    folders = own + [folder for folder in external_folders() if not _is_our_folder(folder)]
    while folders:
        try:
            paths = sorted(folders.pop(0).iterdir())
        except OSError:  # nnU-Net does not search it either
            continue
        yield from (path for path in paths if path.suffix == ".py" or path.suffix in COMPILED)
        folders += [path for path in paths if (path / "__init__.py").is_file()]


def file_with(name: str) -> Path | None:
    """Return a file outside of this package that may bind a name, None if there is none.

    A file that defines a class of the name precedes those that only import or mention it, and these
    precede files of users whose names are not all in their text.
    """
    texts = {path: path.read_text(errors="replace") for path in searched_files()}
    external = tuple(map(str, external_folders()))
    for is_candidate in (
        lambda path, text: re.search(rf"^class {name}\b", text, re.MULTILINE),
        lambda path, text: re.search(rf"\b{name}\b", text),
        lambda path, text: str(path).startswith(external) and _DYNAMIC.search(text),
    ):
        for path, text in texts.items():
            if is_candidate(path, text):
                return path
    return None


def _is_our_folder(folder: Path) -> bool:
    return (folder / "nnUNetTrainerCPR.py").is_file() and (folder / "nnUNetTrainerAMOS.py").is_file()
