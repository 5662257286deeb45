"""Checks of the installation, each with a command that fixes a problem."""

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
from typing import Any

from packaging.version import Version

from nnunet_cpr import __version__
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES

OLDEST_NNUNET = "2.8.0"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: checked component.
        message: state of the component.
        remedy: shell command that fixes the problem, None if there is none.
        is_open: True for something that the user has yet to set, which is no problem.
    """

    subject: str
    message: str
    remedy: str | None = None
    is_open: bool = False


def check_installation() -> Iterator[Finding]:
    """Check all components, each after those that it depends on."""
    yield Finding("python", platform.python_version())
    yield Finding("nnunet-cpr", __version__)
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", f"import failed: {error}", "pip install torch")
    else:
        yield Finding("torch", torch.__version__)
        yield _accelerator()
        nnunet = _nnunet()
        yield nnunet
        if nnunet.remedy is None:
            yield Finding("timm", importlib.metadata.version("timm"))
            yield from _trainers()
    yield from (_folder(name) for name in FOLDER_VARIABLES)


def _accelerator() -> Finding:
    import torch

    triton = "with" if importlib.util.find_spec("triton") else "without"
    if torch.cuda.is_available():
        return Finding("GPU", f"{torch.cuda.get_device_name()}, {triton} Triton")
    if shutil.which("nvidia-smi") and "CUDA_VISIBLE_DEVICES" not in os.environ:
        message = f"torch {torch.__version__} cannot use the installed NVIDIA driver"
        return Finding("GPU", message, "pip install --upgrade --force-reinstall torch")
    return Finding("GPU", f"none available to torch ({triton} Triton): train with -device cpu")


def _nnunet() -> Finding:
    install = f'pip install --upgrade "nnunetv2>={OLDEST_NNUNET}"'
    spec = importlib.util.find_spec("nnunetv2")
    if spec is None:
        return Finding("nnU-Net", "not installed", install)
    version = importlib.metadata.version("nnunetv2")
    is_old = Version(version) < Version(OLDEST_NNUNET)
    problem = ": too old to find trainers in other folders" if is_old else ""
    return Finding("nnU-Net", f"{version}, {spec.origin}{problem}", install if is_old else None)


def _trainers() -> Iterator[Finding]:
    """Search for every family and a combined trainer as nnU-Net does."""
    from nnunet_cpr.names.trainer_name import FAMILIES

    names = (*FAMILIES, "nnUNetTrainerCPR_ws200_40epochs_on_nnUNetTrainerDA5")
    folders = set()
    for name in names:
        try:
            # nnU-Net prints the searched folders.
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

                found = recursive_find_trainer_class_by_name(name)
        except Exception as error:  # any error is the finding
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            remedy = f"pip install --force-reinstall --no-deps {_source()}"
            yield Finding(name, f"not found by nnU-Net: {reason}", remedy)
            return
        if name in FAMILIES:
            method: Any = getattr(found, "build_optimizer", found.__init__)
            folders.add(os.path.dirname(method.__code__.co_filename))
    yield Finding("trainers", f"{len(names)} found by nnU-Net in {', '.join(sorted(folders))}")


def _source() -> str:
    """Return what pip has installed this package from, in quotes for a shell."""
    text = importlib.metadata.distribution("nnunet-cpr").read_text("direct_url.json")
    return shlex.quote(json.loads(text)["url"] if text else "nnunet-cpr")


def _folder(name: str) -> Finding:
    value = os.environ.get(name)
    if not value:
        advice = f"not set; before you prepare data, run: export {name}=/path/to/{name}"
        return Finding(name, advice, is_open=True)
    if not os.path.isdir(value):
        return Finding(name, f"{value} is not a folder", f"mkdir -p {shlex.quote(value)}")
    return Finding(name, value)
