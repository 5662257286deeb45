"""Checks of the installation, each with a command that fixes or shows a problem."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

from nnunet_cpr import __version__
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.nnunet.classes import check_not_taken
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES
from nnunet_cpr.refusals import Refusal

_SIGNS = {
    "nnUNet_raw": "Dataset*/imagesTr",
    "nnUNet_preprocessed": "Dataset*/gt_segmentations",
    "nnUNet_results": "Dataset*/*__*__*",
}
"""Files that only one of nnU-Net's folders has."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: checked component.
        message: state of the component.
        remedy: shell command that fixes or shows the problem, None if there is none.
        is_open: True for something that the user has yet to set, which is no problem.
    """

    subject: str
    message: str
    remedy: str | None = None
    is_open: bool = False


def check_installation() -> Iterator[Finding]:
    """Check all components, each after those that it depends on."""
    yield Finding("python", f"{platform.python_version()}, {platform.platform()}")
    yield Finding("nnunet-cpr", __version__)
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    yield _accelerator()
    yield _nnunet()
    yield Finding("timm", importlib.metadata.version("timm"))
    yield _trainers()
    yield from (_folder(name) for name in FOLDER_VARIABLES)


def _accelerator() -> Finding:
    triton = "with" if importlib.util.find_spec("triton") else "without"
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        name = f"{torch.cuda.get_device_name()}, compute capability {capability}"
        return Finding("GPU", f"{name}, {triton} Triton")
    if shutil.which("nvidia-smi") and "CUDA_VISIBLE_DEVICES" not in os.environ:
        message = f"torch {torch.__version__} cannot use the installed NVIDIA driver"
        return Finding("GPU", message, "pip install --upgrade --force-reinstall torch")
    return Finding("GPU", f"none available to torch ({triton} Triton): train with -device cpu")


def _nnunet() -> Finding:
    version = importlib.metadata.version("nnunetv2")
    is_old = [int(number) for number in re.findall(r"\d+", version)[:2]] < [2, 8]
    remedy = "pip install --upgrade 'nnunetv2>=2.8.0'" if is_old else None
    return Finding("nnU-Net", f"{version}, too old" if is_old else version, remedy)


def _trainers() -> Finding:
    """Search for every family and a combined trainer as nnU-Net does."""
    names = (*FAMILIES, "nnUNetTrainerCPR_ws200_40epochs_on_nnUNetTrainerDA5")
    try:
        # nnU-Net prints the searched folders.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in names:
                recursive_find_trainer_class_by_name(name)
                check_not_taken(name)
    except Refusal as error:
        return Finding("trainers", str(error), error.command or None)
    except Exception as error:  # any error is the finding
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        remedy = "pip install --force-reinstall --no-deps nnunet-cpr"
        return Finding("trainers", f"{name} not found by nnU-Net: {reason}", remedy)
    folders = os.environ.get("nnUNet_extTrainer")
    return Finding("trainers", f"{len(names)} found by nnU-Net, which searches {folders}")


def _folder(name: str) -> Finding:
    value = os.environ.get(name)
    if not value:
        advice = f"not set; before you prepare data, run: export {name}=/path/to/{name}"
        return Finding(name, advice, is_open=True)
    if not os.path.isdir(value):
        return Finding(name, f"{value} is not a folder", f"mkdir -p {shlex.quote(value)}")
    held = [each for each, sign in _SIGNS.items() if any(Path(value).glob(sign))]
    if held and name not in held:
        place = os.environ.get(held[0]) or f"/path/to/{name}"
        return Finding(
            name, f"{value} has the files of {held[0]}", f"export {name}={shlex.quote(place)}"
        )
    try:
        tempfile.TemporaryFile(dir=value).close()
    except OSError as error:
        if name == "nnUNet_results":  # the data may be other people's
            return Finding(name, f"{value} cannot be written: {error.strerror}", f"ls -ld {value}")
    return Finding(name, value)
