"""What nnU-Net needs before several trainings of a data set may start side by side."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.commands import run
from nnunet_cpr.studies.definition import Study, StudyError
from nnunet_cpr.studies.state import write_json

FOLDERS = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")

_FOLDS = 5
"""nnU-Net's own."""
_PLANNERS = {
    "nnUNetPlans": "ExperimentPlanner",
    **{f"nnUNetResEncUNet{size}Plans": f"nnUNetPlannerResEnc{size}" for size in ("M", "L", "XL")},
}


def nnunet_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """nnU-Net's three folders, by their variables.

    Raises:
        StudyError: one is not set.
    """
    missing = [name for name in FOLDERS if not environment.get(name)]
    if missing:
        raise StudyError(f"{', '.join(missing)} not set; nnU-Net wants its folders in these variables")
    return {name: str(Path(environment[name]).absolute()) for name in FOLDERS}


def dataset_name(given: str, folders: Mapping[str, str]) -> str:
    """nnU-Net's full name for a number or a name.

    Raises:
        StudyError: no data set, or several, have this number.
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
        what = (
            f"is one of {', '.join(found)}"
            if found
            else "is in neither nnUNet_raw nor nnUNet_preprocessed"
        )
        raise StudyError(f"data set {given} {what}; give its full name")
    return found[0]


def prepare(study: Study, folders: Mapping[str, str], logs: Path, processes: int) -> None:
    """Plan, preprocess and split what is not yet, all of it with nnU-Net.

    Raises:
        StudyError: a data set, its plans, or a fold is not there.
        CommandFailed: nnU-Net's planning or preprocessing failed.
    """
    if not study.datasets:
        raise StudyError(f"the study {study.name} has no data set; name one with --dataset")
    _find_trainers(study)
    for dataset in study.datasets:
        home = Path(folders["nnUNet_preprocessed"]) / dataset
        for plans in study.plans:
            _plan_and_preprocess(dataset, plans, study.configurations, folders, logs, processes)
        _split(home)
        count = len(_entries(home / "splits_final.json", list))
        for fold in study.folds:
            if fold >= count:
                raise StudyError(f"{dataset} is split into {count} folds, so there is no fold {fold}")


def _find_trainers(study: Study) -> None:
    """As nnU-Net's own command would, but for all of them before the first is trained."""
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    from nnunet_cpr.names import WrongName
    from nnunet_cpr.names.trainer_name import parse_trainer_name

    for row in study.rows:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it tells of every folder it looks into
                recursive_find_trainer_class_by_name(row.trainer)
        except RuntimeError as error:
            try:
                parse_trainer_name(row.trainer)
                advice = "a trainer of your own must be in a folder that nnUNet_extTrainer names"
            except WrongName as almost:
                advice = str(almost)
            raise StudyError(f"nnU-Net finds no trainer {row.trainer}: {advice}") from error


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
                f"{dataset} is not in nnUNet_raw; for the challenges' data sets run nnunet-cpr prepare"
            )
        if plans not in _PLANNERS:
            raise StudyError(f"{dataset} has no plans {plans}: {file} is missing")
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
            raise _damaged(file, "it has no configurations")
        if configuration not in known:
            raise StudyError(
                f"the plans {plans} of {dataset} have no configuration {configuration}, only "
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
    """Whether as many cases are there as nnU-Net has put labels aside for."""
    identifier = None
    name: str | None = configuration
    rest = dict(known)
    while identifier is None and name is not None:  # a configuration may build on another
        if not isinstance(name, str) or name not in rest:
            raise _damaged(plans, f"{configuration} builds on {name!r}, which is not there or on it")
        described = rest.pop(name)
        identifier, name = described.get("data_identifier"), described.get("inherits_from")
    cases = {path.stem for path in (home / str(identifier)).glob("*.pkl")}
    return bool(cases) and cases == set(_cases(home))


def _cases(home: Path) -> list[str]:
    description = home / "dataset.json"
    ending = _entries(description, dict).get("file_ending")
    if not isinstance(ending, str):
        raise _damaged(description, "it has no file_ending")
    files = sorted((home / "gt_segmentations").glob(f"*{ending}"))
    return sorted(path.name.removesuffix(ending) for path in files)


def _split(home: Path) -> None:
    """As nnU-Net would, but before its trainings could write the file over one another."""
    file = home / "splits_final.json"
    if file.exists():
        return
    from nnunetv2.utilities.crossval_split import generate_crossval_split

    cases = _cases(home)
    if len(cases) < _FOLDS:
        raise StudyError(
            f"{home.name} has {len(cases)} training cases, too few for nnU-Net's {_FOLDS} folds; write "
            f"{file} with a split of your own"
        )
    splits = generate_crossval_split(cases, seed=12345, n_splits=_FOLDS)
    write_json(file, [{k: list(map(str, v)) for k, v in split.items()} for split in splits])


def _entries(path: Path, kind: type) -> Any:
    """What a file of nnU-Net's says, a list or a dict."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, kind):
        raise _damaged(path, f"it is no {kind.__name__}")
    return content


def _damaged(path: Path, why: str) -> StudyError:
    return StudyError(f"{path} is damaged ({why}); delete it, and have nnU-Net write it again")
