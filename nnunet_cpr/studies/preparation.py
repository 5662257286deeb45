"""Planning, preprocessing and splitting of data sets before the first run starts."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES, run
from nnunet_cpr.studies.definition import Study, StudyError
from nnunet_cpr.studies.run_state import validation_dice, write_json

_FOLDS = 5
"""Number of folds of nnU-Net's own split."""
_PLANNERS = {
    "nnUNetPlans": "ExperimentPlanner",
    **{f"nnUNetResEncUNet{size}Plans": f"nnUNetPlannerResEnc{size}" for size in ("M", "L", "XL")},
}


def nnunet_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """Return nnU-Net's three folders by the names of their environment variables.

    Raises:
        StudyError: a variable is not set.
    """
    missing = [name for name in FOLDER_VARIABLES if not environment.get(name)]
    if missing:
        raise StudyError(
            f"{', '.join(missing)} not set; set nnU-Net's environment variables to its folders"
        )
    return {name: str(Path(environment[name]).absolute()) for name in FOLDER_VARIABLES}


def dataset_name(given: str, folders: Mapping[str, str]) -> str:
    """Return nnU-Net's full name of a data set, which is given by number or name.

    Raises:
        StudyError: no data set has this number, or several have.
    """
    if not re.fullmatch(r"[0-9]{1,9}", given):
        return given
    found = sorted(
        {
            path.name
            for folder in ("nnUNet_raw", "nnUNet_preprocessed")
            for path in Path(folders[folder]).glob(f"Dataset{int(given):03d}_*")
        }
    )
    if len(found) != 1:
        got = ", ".join(found) or "none"
        raise StudyError(
            f"data set {given}: expected one Dataset{int(given):03d}_* in nnUNet_raw and "
            f"nnUNet_preprocessed, got {got}; give the full name"
        )
    return found[0]


def prepare_study_data(study: Study, folders: Mapping[str, str], logs: Path, processes: int) -> None:
    """Plan, preprocess and split the data sets with nnU-Net where this has not been done.

    Raises:
        StudyError: a data set, its plans, a trainer or a fold is missing.
        CommandFailed: nnU-Net's planning or preprocessing failed.
    """
    if not study.datasets:
        raise StudyError(f"study {study.name}: expected a data set, got none; add --dataset")
    _find_trainers(study, Path(folders["nnUNet_results"]))
    for dataset in study.datasets:
        home = Path(folders["nnUNet_preprocessed"]) / dataset
        for plans in study.plans:
            _plan_and_preprocess(dataset, plans, study.configurations, folders, logs, processes)
        _split(home)
        count = len(_entries(home / "splits_final.json", list))
        for fold in study.folds:
            if fold >= count:
                raise StudyError(f"fold {fold}: {dataset} has folds 0 to {count - 1} only")


def _find_trainers(study: Study, results: Path) -> None:
    """Search the trainers as nnU-Net does, so that a wrong name is found before the first run starts.

    The import of nnU-Net takes seconds and each search a tenth of a second. Therefore trainers without
    an unfinished run are not searched, and those of this package that differ only in suffixes are
    searched once.
    """
    unfinished = {r.trainer for r in study.runs() if validation_dice(r.folder(results)) is None}
    if not unfinished:
        return
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    from nnunet_cpr.names import WrongName
    from nnunet_cpr.names.trainer_name import parse_trainer_name

    found = set()
    for entry in study.trainers:
        if entry.trainer not in unfinished:
            continue
        advice = "for a trainer of your own set nnUNet_extTrainer to its folder"
        try:
            name = parse_trainer_name(entry.trainer)
        except WrongName as almost:
            name, advice = None, str(almost)
        if name is not None and name.family in found:
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints every folder it searches
                recursive_find_trainer_class_by_name(entry.trainer)
        except RuntimeError as error:
            raise StudyError(f"trainer {entry.trainer}: not found by nnU-Net; {advice}") from error
        if name is not None:
            found.add(name.family)


def _plan_and_preprocess(
    dataset: str,
    plans: str,
    configurations: Sequence[str],
    folders: Mapping[str, str],
    logs: Path,
    processes: int,
) -> None:
    home = Path(folders["nnUNet_preprocessed"]) / dataset
    file = home / f"{plans}.json"
    raw = Path(folders["nnUNet_raw"]) / dataset
    environment = {k: v for k, v in os.environ.items() if k != "nnUNet_n_proc_DA"} | dict(folders)
    number = dataset[len("Dataset") :].split("_")[0]
    if not file.exists():
        if not (raw / "dataset.json").exists():
            raise StudyError(
                f"{dataset}: not found in nnUNet_raw; put it there in nnU-Net's raw format "
                "(nnunet-cpr prepare converts archives of challenges)"
            )
        if plans not in _PLANNERS:
            raise StudyError(
                f"{dataset}: no plans {plans}; run nnUNetv2_plan_experiment to write {file}"
            )
        run(
            ["nnUNetv2_extract_fingerprint", "-d", number, "--verify_dataset_integrity"]
            + ["-np", str(processes)],
            logs / f"{dataset}__fingerprint.log",
            environment,
        )
        run(
            ["nnUNetv2_plan_experiment", "-d", number, "-pl", _PLANNERS[plans]],
            logs / f"{dataset}__{plans}__plan.log",
            environment,
        )
    for configuration in configurations:
        known = _entries(file, dict).get("configurations")
        if not isinstance(known, dict) or not all(isinstance(each, dict) for each in known.values()):
            raise _damaged(file, "no configurations")
        if configuration not in known:
            raise StudyError(
                f"{dataset}: unknown configuration {configuration} of {plans}; choose from "
                f"{', '.join(known)}"
            )
        if not _is_preprocessed(home, file, known, configuration):
            run(
                ["nnUNetv2_preprocess", "-d", number, "-plans_name", plans, "-c", configuration]
                + ["-np", str(processes)],
                logs / f"{dataset}__{plans}__{configuration}__preprocess.log",
                environment,
            )


def _is_preprocessed(home: Path, plans: Path, known: dict[str, dict], configuration: str) -> bool:
    """Return True if every case with a label in ``gt_segmentations`` is preprocessed."""
    identifier = None
    name: str | None = configuration
    rest = dict(known)
    while identifier is None and name is not None:  # a configuration may inherit from another
        if not isinstance(name, str) or name not in rest:
            raise _damaged(plans, f"{configuration} inherits from {name!r}, missing or circular")
        described = rest.pop(name)
        identifier, name = described.get("data_identifier"), described.get("inherits_from")
    cases = {path.stem for path in (home / str(identifier)).glob("*.pkl")}
    return bool(cases) and cases == set(_cases(home))


def _cases(home: Path) -> list[str]:
    description = home / "dataset.json"
    ending = _entries(description, dict).get("file_ending")
    if not isinstance(ending, str):
        raise _damaged(description, "no file_ending")
    files = sorted((home / "gt_segmentations").glob(f"*{ending}"))
    return sorted(path.name.removesuffix(ending) for path in files)


def _split(home: Path) -> None:
    """Write nnU-Net's own split before concurrent trainings could write the file at the same time."""
    file = home / "splits_final.json"
    if file.exists():
        return
    from nnunetv2.utilities.crossval_split import generate_crossval_split

    cases = _cases(home)
    if len(cases) < _FOLDS:
        raise StudyError(
            f"{home.name}: expected at least {_FOLDS} training cases for nnU-Net's {_FOLDS} folds, got "
            f"{len(cases)}; write a split of your own to {file}"
        )
    splits = generate_crossval_split(cases, seed=12345, n_splits=_FOLDS)
    write_json(file, [{k: list(map(str, v)) for k, v in split.items()} for split in splits])


def _entries(path: Path, kind: type) -> Any:
    """Return the list or dict in a JSON file of nnU-Net."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, kind):
        raise _damaged(path, f"expected a {kind.__name__}")
    return content


def _damaged(path: Path, reason: str) -> StudyError:
    return StudyError(f"{path}: damaged ({reason}); restore it")
