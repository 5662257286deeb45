"""Prediction with all folds and seeds of one of a study's trainers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from nnunet_cpr.datasets import formats
from nnunet_cpr.datasets.matching import find, find_cases
from nnunet_cpr.datasets.raw import copy_image
from nnunet_cpr.files import read_json, remove_temporary_files
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, is_complete_checkpoint
from nnunet_cpr.nnunet.is_finished import find_validation
from nnunet_cpr.refusals import Refusal, one_line
from nnunet_cpr.studies.data import find_trainers
from nnunet_cpr.studies.state import write_json
from nnunet_cpr.studies.study import Run, Study
from nnunet_cpr.studies.worker import default_device

_RECORD = "study_predict.json"
_SHOWN = 3
"""Number of names in an error."""
_COLOR_READER = "NaturalImage2DIO"
"""nnU-Net's class for PNG and the like, whose files have all colors or one channel."""


@dataclass(frozen=True)
class Ensemble:
    """Trained models of a setting.

    Attributes:
        trainers: the trainer's class name with each seed.
        models: nnU-Net's folder of each of them.
        folds: the folds of each model.
        previous: models of a cascade's previous stage, None without one.
    """

    trainers: tuple[str, ...]
    models: tuple[Path, ...]
    folds: tuple[int, ...]
    previous: Ensemble | None = None

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoints of all folds and seeds."""
        return [model / f"fold_{n}" / FINAL_CHECKPOINT for model in self.models for n in self.folds]

    def find_postprocessing(self) -> tuple[Path | None, str]:
        """Return the file of nnU-Net's postprocessing, None without one, and a sentence about it.

        nnU-Net determines it for a model and its folds; seeds have to agree.
        """
        results = f"crossval_results_folds_{'_'.join(map(str, self.folds))}"
        files = [model / results / "postprocessing.pkl" for model in self.models]
        found = [path.read_bytes() for path in files if path.exists()]
        if not found:
            return None, "no postprocessing, as nnU-Net has determined none for these folds"
        said = f"no postprocessing: expected the same of all seeds in {results}"
        if lacking := [path.parents[1] for path in files if not path.exists()]:
            trainer, plans, configuration = lacking[0].name.split("__")
            command = (
                f"nnUNetv2_find_best_configuration {lacking[0].parent.name} -tr {trainer} -p {plans} "
                f"-c {configuration} -f {' '.join(map(str, self.folds))} --disable_ensembling"
            )
            return None, f"{said}; {lacking[0].name} has none, run: {command}"
        if len(set(found)) > 1:
            return None, said
        return files[0], f"with nnU-Net's postprocessing in {results}"


def select_ensemble(study: Study, results: Path, setting: str | None) -> Ensemble:
    """Return the trained models of one of a study's trainers.

    Args:
        study: the study, with one data set, configuration and plans.
        results: ``nnUNet_results``.
        setting: label or class name of the trainer; None if there is one only.

    Raises:
        Refusal: several are possible, or a run has no final checkpoint.
    """
    titles = [entry.full_title for entry in study.trainers]
    choices: dict[str, Sequence[str]] = {
        "--dataset": study.datasets,
        "--configuration": study.configurations,
        "--plans": study.plans,
        "--setting": [setting] if setting else titles,
    }
    for option, values in choices.items():
        if len(values) != 1:
            listed = f"; choose from {'; '.join(values)}" if values else ""
            raise Refusal(f"{option}: expected one to predict with, got {len(values)}{listed}")
    try:
        key = study.find_trainer("--setting", setting or titles[0])
    except ValueError as error:
        raise Refusal(str(error)) from None
    return _trained(study, results, [run for run in study.runs() if run.entry == key])


def _trained(study: Study, results: Path, runs: Sequence[Run]) -> Ensemble:
    """Return the models of runs with all folds and seeds.

    Raises:
        Refusal: one has no final checkpoint, or models have other plans than the first.
    """
    missing = [run for run in runs if not is_complete_checkpoint(run.folder(results) / FINAL_CHECKPOINT)]
    if missing:
        shown = "; ".join(run.fold_and_seed for run in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        state, advice = "are not trained", f"run: nnunet-cpr study run {study.name}"
        if any(find_validation(run.folder(results)) for run in missing):  # they are finished without it
            state, advice = f"have no {FINAL_CHECKPOINT}", "copy them from where the runs were trained"
        raise Refusal(
            f"{runs[0].entry}, {runs[0].configuration}: {len(missing)} of {len(runs)} runs {state}: "
            f"{shown}{more}",
            f"{advice}{_available(runs, missing)}",
        )
    models = {run.folder(results).parent: run.trainer for run in runs}
    first, *others = models
    plans = read_json(first / "plans.json")
    for other in others:
        if read_json(other / "plans.json") != plans:
            raise Refusal(f"{other}: expected the plans.json of {first}", "choose seeds with the same")
    stage = plans["configurations"].get(runs[0].configuration, {}).get("previous_stage")
    before = [replace(run, configuration=stage) for run in runs]
    previous = _trained(study, results, before) if stage else None
    folds = dict.fromkeys(run.fold for run in runs)
    return Ensemble((*models.values(),), (*models,), (*folds,), previous)


def _available(runs: Sequence[Run], missing: Sequence[Run]) -> str:
    """Return the option that leaves out runs that are missing and keeps most, if one keeps any."""
    kept: dict[str, list[Run]] = {}
    for option in ("fold", "seed"):
        without = {getattr(run, option) for run in missing}
        kept[option] = [run for run in runs if getattr(run, option) not in without]
    option = max(kept, key=lambda each: len(kept[each]))
    rest = [str(number) for number in dict.fromkeys(getattr(run, option) for run in kept[option])]
    if not rest:
        return ""
    given = ",".join(rest) if len(rest) > 1 else f"{rest[0]}-{rest[0]}"
    return f", or predict with --{option}s {given}"


def find_images(images: Path, model: Path) -> dict[str, list[Path]]:
    """Return the image files of each case that a model can segment, in any format and with any names.

    Args:
        images: folder or pattern, as of ``nnunet-cpr prepare folder``.
        model: folder of the model, with its ``dataset.json`` and ``plans.json``.

    Raises:
        Refusal: there are none, channels are missing, or nnU-Net's reader needs another format.
    """
    description = read_json(model / "dataset.json")
    reader = read_json(model / "plans.json").get("image_reader_writer", "")
    channels, ending = [*description["channel_names"].values()], description["file_ending"]
    found = find(images)
    for path in found.others:
        is_named = path.name.endswith(ending) or formats.has_image_name(path)
        if is_named and not path.name.startswith("."):
            raise Refusal(
                f"{path}: expected an image, got a damaged file, a link to nowhere, or one beside DICOM",
                "mend it, or move it away",
            )
    cases = find_cases(found, channels, has_colors=reader == _COLOR_READER)
    others = [path for files in cases.values() for path in files if not path.name.endswith(ending)]
    if others and not _reads_nifti(reader):
        raise Refusal(f"{others[0]}: expected {ending}, as {reader} reads no other format")
    return cases


def _reads_nifti(reader: str) -> bool:
    """Return True if a class of nnU-Net reads NIfTI, to which all other formats can be converted."""
    from nnunetv2.imageio.reader_writer_registry import recursive_find_reader_writer_by_name

    return ".nii.gz" in recursive_find_reader_writer_by_name(reader).supported_file_endings


def predict(
    ensemble: Ensemble, images: Path, output: Path, device: str | None = None
) -> Iterator[tuple[int, int]]:
    """Segment all cases of a folder, and yield the numbers of those that are done and of all.

    Cases whose segmentation exists are not predicted again, unless the models or the images are others,
    which is refused. The segmentations of a cascade's previous stage are in a folder of their own.

    Args:
        ensemble: the models.
        images: folder or pattern of the images, in any format that ``prepare folder`` takes.
        output: folder of the segmentations, with a record of how they were made.
        device: ``cuda``, ``cpu`` or ``mps``; by default a GPU if any.

    Raises:
        Refusal: images are missing or invalid, or the folder has something else.
    """
    model = ensemble.models[0]
    cases, ending = find_images(images, model), read_json(model / "dataset.json")["file_ending"]
    postprocessing, _ = ensemble.find_postprocessing()
    _begin(ensemble, images, output, postprocessing)
    _check_images(cases, output, ending)
    before = output / "previous_stage"
    if ensemble.previous:
        yield from predict(ensemble.previous, images, before, device)
    left = [case for case in cases if not (output / f"{case}{ending}").exists()]
    yield len(cases) - len(left), len(cases)
    if not left:
        return
    find_trainers(ensemble.trainers, has_seeds=False)
    import torch

    from nnunet_cpr.nnunet.tools.ensemble import EnsemblePredictor

    used = torch.device(device or default_device())
    try:
        predictor = EnsemblePredictor(ensemble.models, ensemble.folds, used, postprocessing)
    except (RuntimeError, LookupError, TypeError) as error:  # torch's has a line for each tensor
        reason = f"nnU-Net's inference cannot load its network: {one_line(error)}"
        raise Refusal(f"{model}: {reason}") from error
    for number, case in enumerate(left, len(cases) - len(left) + 1):
        file = f"{case}{ending}"
        previous = before / file if ensemble.previous else None
        try:
            with TemporaryDirectory() as folder:
                given = [
                    _as_read(path, Path(folder) / f"{n}.nii.gz", ending)
                    for n, path in enumerate(cases[case])
                ]
                predictor.predict(given, output / file, previous)
        except RuntimeError as error:  # of SimpleITK on a damaged file, or of a GPU without memory
            raise Refusal(f"{images}: {case} could not be predicted: {error}") from error
        yield number, len(cases)


def _as_read(image: Path, converted: Path, ending: str) -> Path:
    """Return a file that nnU-Net's reader of a model reads: the image, or its conversion to NIfTI."""
    if image.name.endswith(ending):
        return image
    copy_image(image, converted)
    return converted


def _check_images(cases: Mapping[str, Sequence[Path]], output: Path, ending: str) -> None:
    """Check that segmentations which exist are of the images that are there now, and record the others.

    Raises:
        Refusal: an image was replaced under its name.
    """
    file = output / _RECORD
    record = read_json(file)
    known = record.setdefault("cases", {})
    for case, paths in cases.items():
        found = {path.name: _size_and_time(path) for path in paths}
        segmentation = output / f"{case}{ending}"
        if not segmentation.exists():
            known[case] = found
        elif known.setdefault(case, found) != found:
            raise Refusal(
                f"{segmentation}: the image of {case} has changed since it was predicted",
                "remove the segmentation to predict it again",
            )
    write_json(file, record)


def _size_and_time(image: Path) -> list[int]:
    """Return the size of an image's files together and the time of the newest change."""
    files = [path.stat() for path in formats.files(image)]
    return [sum(file.st_size for file in files), max(file.st_mtime_ns for file in files)]


def _begin(ensemble: Ensemble, images: Path, output: Path, postprocessing: Path | None) -> None:
    """Record how the segmentations are made, where nothing else is."""
    used = [*ensemble.checkpoints, *([postprocessing] if postprocessing else [])]
    changed = {str(path): path.stat().st_mtime for path in used}
    record = {"images": str(images.absolute()), "files": changed}
    file = output / _RECORD
    if file.exists() and {**read_json(file), **record} != read_json(file):
        raise Refusal(
            f"{output}: has predictions of other images or models, see {file}", "choose another folder"
        )
    if not file.exists() and output.exists() and any(output.iterdir()):
        raise Refusal(f"{output}: expected a new or empty folder, or one of an earlier prediction")
    output.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_json(file, record)
    remove_temporary_files(output, "*")
    for name in ("dataset.json", "plans.json"):
        shutil.copy(ensemble.models[0] / name, output)
