"""Files in which nnU-Net searches for trainers."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path

import nnunet_cpr

EXTERNAL_TRAINERS = "nnUNet_extTrainer"
"""Environment variable with the folders that nnU-Net searches after its own."""


def family_file(family: str) -> Path:
    """Return the file that defines a trainer family of this package."""
    parent = Path(nnunet_cpr.__file__).parents[1]
    # "nnunet_cpr_trainers" in an installed wheel, "trainers" in a checkout.
    files = [parent / folder / f"{family}.py" for folder in ("nnunet_cpr_trainers", "trainers")]
    return next(path for path in files if path.is_file())


def file_with(name: str) -> Path | None:
    """Return a file outside of this package that may bind a name, None if there is none."""
    binds = re.compile(rf"^[^#\n]*\b{re.escape(name)}\b", re.MULTILINE)
    texts = _searched_texts(os.environ.get(EXTERNAL_TRAINERS, ""))
    return next((path for path, text in texts if binds.search(text)), None)


@functools.cache  # a search asks for several names
def _searched_texts(external: str) -> list[tuple[Path, str]]:
    """Return the modules that nnU-Net searches, without those of this package."""
    spec = importlib.util.find_spec("nnunetv2")
    packages = (spec and spec.submodule_search_locations) or ()
    folders = [Path(package) / "training" / "nnUNetTrainer" for package in packages]
    folders += [Path(folder) for folder in external.split(os.pathsep) if folder.strip()]
    is_ours = [(folder / "nnUNetTrainerAttachCPR.py").is_file() for folder in folders]
    searched = [folder for folder, ours in zip(folders, is_ours) if not ours]
    walks = [walk for folder in searched for walk in os.walk(folder, followlinks=True)]
    files = [Path(root, name) for root, _, names in walks for name in sorted(names)]
    modules = [path for path in files if path.suffix == ".py" and path.is_file()]
    return [(path, path.read_text(errors="replace")) for path in modules]
