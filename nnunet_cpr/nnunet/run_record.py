"""Record of what a run is made from, beside its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nnunet_cpr.files import atomic_write, read_json
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, PRETRAINED, RECORD, is_complete_checkpoint

_PACKAGES = ("nnunet-cpr", "nnunetv2", "torch")
_KEPT_PLANS = "plans.json"
"""File in which nnU-Net keeps the plans of a model, beside its folds."""


@dataclass(frozen=True)
class RunRecord:
    """Parts of a run; what is not known is empty or None, and contradicts nothing.

    Attributes:
        trainer: class name of the trainer.
        dataset: name of the data set.
        training: all that the trainer's name trains, as plain values; empty for trainers of others.
        plans: settings of the configuration, as they were given to the trainer.
        split: ids of the cases, ``train`` and ``val``.
        weights: pretrained weights, as of :func:`~nnunet_cpr.nnunet.seen_cases.describe_origin`; empty
            for random weights, None if unknown.
        versions: versions of the packages by name.
        started: when the training began, in seconds since 1970.
        finished_after: number of epochs after which ``nnunet-cpr finish`` ended it.
        validated: checkpoint of the last validation, with its ``epochs``.

    Example:
        >>> one = RunRecord(split={"train": ["a", "b"], "val": ["c"]})
        >>> list(one.differences(RunRecord(split={"train": ["a"], "val": ["c"]})))
        ['training cases: expected 2, got 1']
        >>> list(one.differences(RunRecord()))
        []
    """

    trainer: str = ""
    dataset: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, list[str]] = field(default_factory=dict)
    weights: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    started: float | None = None
    finished_after: int | None = None
    validated: Mapping[str, Any] = field(default_factory=dict)

    def differences(self, other: RunRecord) -> Iterator[str]:
        """Yield what another run is made from that this one is not; versions may differ."""
        for title in ("training", "plans"):
            own, others = getattr(self, title), getattr(other, title)
            for key in own:
                if key in others and own[key] != others[key]:
                    yield f"{title} {key}: expected {own[key]}, got {others[key]}"
        for part, title in (("train", "training cases"), ("val", "validation cases")):
            if self.split and other.split:
                yield from _case_difference(title, self.split[part], other.split[part])
        if self.weights is not None and other.weights is not None:
            expected, got = self.weights.get("sha256"), other.weights.get("sha256")
            if expected != got:
                yield f"weights: expected {describe_weights(self.weights)}, got " + describe_weights(
                    other.weights
                )

    def write(self, fold: Path) -> None:
        """Write the record of a fold atomically.

        Raises:
            OSError: it cannot be written; a previous one is unchanged.
        """
        with atomic_write(fold / RECORD) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def changed(self, fold: Path, **changes: Any) -> None:
        """Write the record of a fold with other values."""
        dataclasses.replace(self, **changes).write(fold)

    @property
    def leaked(self) -> list[str]:
        """Ids of the validation cases on which the pretrained weights were trained."""
        return list((self.weights or {}).get("seen", ()))


def _case_difference(title: str, own: list[str], others: list[str]) -> Iterator[str]:
    if {*own} == {*others}:
        return
    if len(own) != len(others):
        yield f"{title}: expected {len(own)}, got {len(others)}"
    else:
        yield f"{title}: expected {min({*own} - {*others})} among them, got {min({*others} - {*own})}"


def read_record(fold: Path) -> RunRecord | None:
    """Return the record of a fold, None if it has none, as those of versions before 0.4.0."""
    try:
        return _read_record(fold / RECORD, (fold / RECORD).stat().st_mtime_ns)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


@lru_cache(maxsize=4096)  # the live table of a study asks every second
def _read_record(file: Path, changed: int) -> RunRecord:
    content = read_json(file)
    known = {each.name for each in dataclasses.fields(RunRecord)}
    return RunRecord(**{key: value for key, value in content.items() if key in known})


def record_of(fold: Path) -> RunRecord:
    """Return what a fold's run is made from, as far as its files tell.

    Args:
        fold: such as ``nnUNetTrainerCPR__nnUNetPlans__3d_fullres/fold_0``.
    """
    record = read_record(fold)
    if record is not None:
        return record
    trainer, _, configuration = (*fold.parent.name.split("__"), "", "")[:3]
    plans: dict[str, Any] = {}
    with suppress(OSError, ValueError, LookupError, TypeError):
        plans = configuration_of(read_json(fold.parent / _KEPT_PLANS), configuration)
    return RunRecord(trainer, plans=plans, weights=_weights_in_checkpoint(fold))


def configuration_of(plans: Mapping[str, Any], configuration: str) -> dict[str, Any]:
    """Return the settings of a configuration with those that it inherits.

    Raises:
        LookupError: the plans do not have the configuration.

    Example:
        >>> low, high = {"batch_size": 2, "spacing": [2]}, {"inherits_from": "low", "spacing": [1]}
        >>> configuration_of({"configurations": {"low": low, "high": high}}, "high")
        {'batch_size': 2, 'spacing': [1]}
    """
    own = dict(plans["configurations"][configuration])
    inherited = own.pop("inherits_from", None)
    return own if inherited is None else {**configuration_of(plans, inherited), **own}


def versions() -> dict[str, str]:
    """Return the versions of what trains."""
    import torch

    found = {"CUDA": torch.version.cuda or "none"}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def split_problems(split: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield what is wrong with a fold's cases, which may be written by hand."""
    train, val = split.get("train", []), split.get("val", [])
    if split and not val:
        yield "the fold has no validation cases: its Dice cannot be computed"
    if both := sorted({*train} & {*val}):
        yield (
            f"{len(both)} of the {len(val)} validation cases are trained on, such as {both[0]}: their "
            "Dice says nothing of new cases"
        )


def new_record(trainer: str, **known: Any) -> RunRecord:
    """Return the record of a run that begins now."""
    return RunRecord(trainer, versions=versions(), **{"started": time.time(), **known})


def describe_weights(weights: Mapping[str, Any]) -> str:
    """Return pretrained weights in words."""
    return f"{weights['path']} (SHA-256 {weights['sha256']})" if weights else "random weights"


def recorded_weights(checkpoint: Path) -> dict[str, str] | None:
    """Return path and SHA-256 of the weights that a checkpoint's training began with.

    Args:
        checkpoint: file of nnU-Net.

    Returns:
        An empty dictionary for random weights, None if the file has no record of a training.
    """
    import torch  # takes long

    from nnunet_cpr.nnunet.checkpoints import restricted_loading

    with restricted_loading():
        content = torch.load(checkpoint, map_location="meta", mmap=True)
    arguments = content.get("init_args")
    return None if arguments is None else dict(arguments.get(PRETRAINED, {}))


def _weights_in_checkpoint(fold: Path) -> dict[str, str] | None:
    """Return path and hash of the weights that a fold began with, None if no checkpoint says so."""
    checkpoint = next(filter(is_complete_checkpoint, map(fold.joinpath, CHECKPOINTS)), None)
    if checkpoint is None or (content := _pickled(checkpoint)) is None:
        return None
    if PRETRAINED.encode() not in content:
        return {}
    return recorded_weights(checkpoint)


def _pickled(checkpoint: Path) -> bytes | None:
    """Return the pickle in a checkpoint, None if there is none or it is damaged."""
    with zipfile.ZipFile(checkpoint) as archive:
        names = [name for name in archive.namelist() if name.endswith("data.pkl")]
        try:
            return archive.read(names[0]) if names else None
        except zipfile.BadZipFile:
            return None
