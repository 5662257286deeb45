"""Checks of the pretrained weights with which runs of a study begin."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, PRETRAINED, is_complete_checkpoint
from nnunet_cpr.studies.definition import Run, Study, StudyError
from nnunet_cpr.studies.run_state import parse_trainer, validation_dice


def begins(run: Run, results: Path) -> bool:
    """Return True if a run has neither a checkpoint nor a validation yet.

    Args:
        run: the run.
        results: ``nnUNet_results``.
    """
    fold = run.folder(results)
    has_checkpoint = any(is_complete_checkpoint(fold / name) for name in CHECKPOINTS)
    return not has_checkpoint and validation_dice(fold) is None


def check_pretrained(study: Study, folders: Mapping[str, str]) -> None:
    """Check that each run begins, or began, with the weights that its entry gives.

    Args:
        study: the study.
        folders: nnU-Net's folders; networks are compared where the plans exist.

    Raises:
        StudyError: a checkpoint is missing, cannot be read, does not fit the network of a run, or is not
            the one with which a run began.
    """
    results = Path(folders["nnUNet_results"])
    by_weights: dict[Path, list[Run]] = {}
    for run in study.runs():
        ours = parse_trainer(run.trainer)
        if weights := run.weights(results):
            by_weights.setdefault(weights, []).append(run)
        elif ours is not None and ours.pretrained is None:
            _check_from_scratch(run, results)
        elif ours is not None and begins(run, results):
            raise StudyError(f"{run.entry}: expected an entry 'pretrained' with a checkpoint, got none")
    by_file: dict[Path, str] = {}
    for entry in filter(lambda entry: entry.pretrained, study.trainers):
        file = (results / Path(entry.pretrained).expanduser()).resolve()
        if (first := by_file.setdefault(file, entry.pretrained)) != entry.pretrained:
            raise StudyError(
                f"pretrained: {first} and {entry.pretrained} are one file; write it in one way, as runs "
                "that begin with it are found by what is written"
            )
    for weights, runs in by_weights.items():
        _check_records(weights, runs, results)
        if beginning := [run for run in runs if begins(run, results)]:
            _check_fit(weights, beginning, folders)


def _check_from_scratch(run: Run, results: Path) -> None:
    """Check that a run without pretrained weights did not begin with any, as nnU-Net allows."""
    fold = run.folder(results)
    checkpoint = _newest(fold)
    if checkpoint is not None and _has_record(checkpoint) and (record := _record(fold)):
        raise StudyError(
            f"{fold}: expected a training that began with random weights, got one from "
            f"{_described(record)}; move it away, or give the entry 'pretrained'"
        )


def _check_records(weights: Path, runs: Iterable[Run], results: Path) -> None:
    """Check that all runs began with the same weights, those of the file if it is still there."""
    from nnunet_cpr.nnunet.pretrained_weights import sha256  # imports torch

    expected = sha256(weights) if weights.is_file() else None
    for fold in (run.folder(results) for run in runs):
        record = _record(fold)
        if record is None:
            continue
        began = record.get("sha256")
        expected = expected or began
        if began is None or began != expected:
            raise StudyError(
                f"{fold}: expected a training that began with {weights} (SHA-256 {expected}), got one "
                f"from {_described(record)}; move it away, or add _pre<Word> with another word to the "
                "trainer"
            )


def _record(fold: Path) -> dict[str, str] | None:
    """Return path and hash of the weights that a fold began with, None if no checkpoint says so."""
    from nnunet_cpr.nnunet.pretrained_weights import recorded_weights  # imports torch

    checkpoint = _newest(fold)
    return None if checkpoint is None else recorded_weights(checkpoint)


def _newest(fold: Path) -> Path | None:
    return next(filter(is_complete_checkpoint, map(fold.joinpath, CHECKPOINTS)), None)


def _has_record(checkpoint: Path) -> bool:
    """Return True if a checkpoint may have a record; most have none, and torch takes long to import."""
    with zipfile.ZipFile(checkpoint) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
        return any(PRETRAINED.encode() in archive.read(name) for name in pickles)


def _described(record: Mapping[str, str]) -> str:
    return f"{record['path']} (SHA-256 {record['sha256']})" if record else "random weights"


def _check_fit(weights: Path, runs: Iterable[Run], folders: Mapping[str, str]) -> None:
    """Check that a checkpoint can be read and fits the networks of runs whose plans exist."""
    from nnunet_cpr.nnunet import checkpoints  # they import torch
    from nnunet_cpr.nnunet.pretrained_weights import misfit
    from nnunet_cpr.nnunet.tools.networks import network_shapes

    if not weights.is_file():
        raise StudyError(
            f"pretrained: expected a checkpoint, got no file {weights}; write an absolute path, or one "
            "from nnUNet_results"
        )
    try:
        given = checkpoints.read(weights, needed=("network_weights",))["network_weights"]
    except checkpoints.UnusableCheckpoint as error:
        raise StudyError(f"pretrained: {error}") from error
    for dataset, plans, configuration, trainer in dict.fromkeys(
        (run.dataset, run.plans, run.configuration, run.trainer) for run in runs
    ):
        home = Path(folders["nnUNet_preprocessed"]) / dataset
        if not (home / f"{plans}.json").exists():
            continue
        described = read_json(home / f"{plans}.json"), read_json(home / "dataset.json")
        if configuration not in described[0]["configurations"]:
            continue  # refused with the plans
        shapes = network_shapes(trainer, *described, configuration)
        if shapes is not None and (reason := misfit(shapes, given)):
            raise StudyError(
                f"pretrained: {weights} does not fit the network of {dataset}, {plans}, "
                f"{configuration}: {reason}; fine-tune with the plans of the weights"
            )
