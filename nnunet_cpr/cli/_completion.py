"""Shell completion of arguments; only the standard library is imported, as a shell waits for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_PLAIN = re.compile(r"[\w./+@%,=~-]+")
"""Names that no shell interprets; others are not offered."""
_PRESETS = Path(__file__).parents[1] / "studies" / "presets"


def complete_study(incomplete: str) -> list[str]:
    """Return the YAML files, the studies that have been run, and the presets that match."""
    return [*_files(incomplete), *_matching({*_saved(), *_presets()}, incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    """Return the presets that match."""
    return _matching(set(_presets()), incomplete)


def complete_saved_study(incomplete: str) -> list[str]:
    """Return the studies that have been run and match."""
    return _matching(set(_saved()), incomplete)


def complete_dataset(incomplete: str) -> list[str]:
    """Return the data sets of nnU-Net that match."""
    folders = (os.environ.get(name, "") for name in ("nnUNet_raw", "nnUNet_preprocessed"))
    names = {name for folder in folders if folder for name in _entries(Path(folder))}
    return _matching({name for name in names if name.startswith("Dataset")}, incomplete)


def _matching(names: set[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete) and _PLAIN.fullmatch(name))


def _presets() -> Iterator[str]:
    return (name.removesuffix(".yaml") for name in _entries(_PRESETS) if name.endswith(".yaml"))


def _saved() -> Iterator[str]:
    results = os.environ.get("nnUNet_results")
    studies = Path(results, "studies") if results else None
    for name in _entries(studies) if studies is not None else ():
        if os.path.isfile(Path(str(studies), name, "study.yaml")):
            yield name


def _files(incomplete: str) -> list[str]:
    """Return YAML files and folders; bash completes folders by itself, without a blank behind them."""
    is_bash = os.environ.get("_NNUNET_CPR_COMPLETE") == "complete_bash"
    folder, _, _ = incomplete.rpartition("/")
    prefix = incomplete[: len(folder) + 1] if "/" in incomplete else ""
    found = set()
    for name in _entries(Path(prefix or ".")):
        if os.path.isdir(f"{prefix or './'}{name}"):
            if not name.startswith(".") and not is_bash:
                found.add(f"{prefix}{name}/")
        elif name.endswith((".yaml", ".yml")):
            found.add(f"{prefix}{name}")
    return _matching(found, incomplete)


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
