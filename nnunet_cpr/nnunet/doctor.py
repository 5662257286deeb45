"""``nnunet-cpr doctor``: whether everything fits, and the one command that mends what does not."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import shlex
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from nnunet_cpr import __version__

OLDEST_NNUNET = Version("2.8.0")
NNUNET_FOLDERS = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. Something is wrong where there is a ``remedy``, a command to run."""

    subject: str
    what: str
    remedy: str | None = None


def examine() -> Iterator[Finding]:
    """Look at everything, in the order in which things depend on each other."""
    yield Finding("python", platform.python_version())
    yield Finding("nnunet-cpr", f"{__version__}, {_installed_how('nnunet-cpr')}")
    torch = _torch()
    yield torch
    if torch.remedy is None:
        yield _accelerator()
        nnunet = _nnunet()
        yield nnunet
        if nnunet.remedy is None:
            from nnunet_cpr.names.trainer_name import FAMILIES

            yield from (_trainer(name) for name in FAMILIES)
            yield _trainer("nnUNetTrainerCPR_ws200_40epochs_50iters")
    yield from (_folder(name) for name in NNUNET_FOLDERS)


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", f"cannot be imported: {error}", "pip install torch")
    return Finding("torch", torch.__version__)


def _accelerator() -> Finding:
    import torch

    triton = "with" if importlib.util.find_spec("triton") else "without"
    if torch.cuda.is_available():
        return Finding("GPU", f"{torch.cuda.get_device_name()}, {triton} Triton")
    if shutil.which("nvidia-smi") and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return Finding(
            "GPU",
            f"there is an NVIDIA driver, but torch {torch.__version__} cannot use it",
            "pip install --upgrade --force-reinstall torch",
        )
    return Finding("GPU", f"none that torch can use ({triton} Triton): train with -device cpu")


def _nnunet() -> Finding:
    install = f'pip install --upgrade "nnunetv2>={OLDEST_NNUNET}"'
    spec = importlib.util.find_spec("nnunetv2")
    if spec is None:
        return Finding("nnU-Net", "not installed", install)
    if spec.origin is None:
        leftover = next(iter(spec.submodule_search_locations or ["nnunetv2"]))
        return Finding(
            "nnU-Net",
            f"hidden by a leftover folder {leftover} without an __init__.py",
            f"rm -r {shlex.quote(leftover)}",
        )
    try:
        version = importlib.metadata.version("nnunetv2")
    except importlib.metadata.PackageNotFoundError:
        return Finding("nnU-Net", f"{spec.origin} belongs to no installed package", install)
    what = f"{version}, {_installed_how('nnunetv2')}, {Path(spec.origin).parent}"
    if Version(version) < OLDEST_NNUNET:
        return Finding("nnU-Net", f"{what}: too old to find trainers in other folders", install)
    try:
        _find_trainer("nnUNetTrainer")
    except Exception as error:  # whatever keeps nnU-Net from it is the finding
        return Finding(
            "nnU-Net",
            f"{what}: does not find its own trainer: {_first_line(error)}",
            "pip install --upgrade --force-reinstall nnunetv2",
        )
    return Finding("nnU-Net", what)


def _trainer(name: str) -> Finding:
    """Found the way nnU-Net finds it."""
    try:
        found = _find_trainer(name)
    except Exception as error:  # whatever keeps nnU-Net from it is the finding
        return Finding(
            name,
            f"not found by nnU-Net: {_first_line(error)}",
            f"pip install --force-reinstall --no-deps {_origin('nnunet-cpr')}",
        )
    return Finding(name, f"found by nnU-Net, {found.__mro__[1].__module__}")


def _find_trainer(name: str) -> type:
    # nnU-Net tells on stdout where it searches.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

        return recursive_find_trainer_class_by_name(name)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _folder(name: str) -> Finding:
    value = os.environ.get(name)
    if not value:
        return Finding(name, f"not set; before preparing data: export {name}=/path/to/{name}")
    if not os.path.isdir(value):
        return Finding(name, f"{value} is not a folder", f"mkdir -p {shlex.quote(value)}")
    return Finding(name, value)


def _direct_url(distribution: str) -> dict:
    """Where pip installed a distribution from, {} where that was a package index."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    try:
        return dict(json.loads(text)) if text else {}
    except (ValueError, TypeError):
        return {}  # as good as not written


def _installed_how(distribution: str) -> str:
    editable = _direct_url(distribution).get("dir_info", {}).get("editable")
    return "editable install" if editable else "regular install"


def _origin(distribution: str) -> str:
    """What to give to ``pip install`` to install it again."""
    origin = _direct_url(distribution)
    if not origin:
        return distribution
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return editable + shlex.quote(origin["url"].removeprefix("file://"))
