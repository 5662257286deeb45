"""Planning, preprocessing and splitting of data sets before the first run starts."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES, run
from nnunet_cpr.nnunet.tools.trainer_search import external_trainers, missing_trainers
from nnunet_cpr.nnunet.trainer_files import EXTERNAL_TRAINERS
from nnunet_cpr.studies.definition import Run, Study, StudyError
from nnunet_cpr.studies.run_state import validation_dice, write_json

SPLITS = "splits_final.json"
_FOLDS = 5
"""Number of folds of nnU-Net's own split."""
_PLANNERS = {
    "nnUNetPlans": "ExperimentPlanner",
    **{f"nnUNetResEncUNet{size}Plans": f"nnUNetPlannerResEnc{size}" for size in ("M", "L", "XL")},
}


def nnunet_folders(
    environment: Mapping[str, str], needed: Sequence[str] = FOLDER_VARIABLES
) -> dict[str, str]:
    """Return those of nnU-Net's folders that are set, by the names of their environment variables.

    Args:
        environment: environment variables.
        needed: the variables that must be set; results can be read without the data.

    Raises:
        StudyError: a needed variable is not set.
    """
    _require_folders(environment, needed)
    given = [name for name in FOLDER_VARIABLES if environment.get(name)]
    return {name: str(Path(environment[name]).absolute()) for name in given}


def _require_folders(given: Mapping[str, str], needed: Sequence[str]) -> None:
    missing = [name for name in needed if not given.get(name)]
    if missing:
        raise StudyError(
            f"{', '.join(missing)} not set; set nnU-Net's environment variables to its folders"
        )


def dataset_name(given: str, folders: Mapping[str, str]) -> str:
    """Return nnU-Net's full name of a data set, which is given by number or name.

    Raises:
        StudyError: no data set has this number, or several have, or the folders are not set.
    """
    if not re.fullmatch(r"[0-9]{1,9}", given):
        return given
    _require_folders(folders, FOLDER_VARIABLES)
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


@dataclass(frozen=True)
class Step:
    """Command of nnU-Net that prepares a data set.

    Attributes:
        command: its name and arguments.
        log: name of its log without suffix.
    """

    command: tuple[str, ...]
    log: str


def check_study_data(study: Study, folders: Mapping[str, str], processes: int) -> list[Step]:
    """Check a study's trainers, data sets and folds as far as possible without changing a file.

    Returns:
        The steps before the first training.

    Raises:
        StudyError: a folder of nnU-Net, a data set, its plans, a trainer or a fold is missing.
    """
    _require_folders(folders, FOLDER_VARIABLES)
    if not study.datasets:
        raise StudyError(f"study {study.name}: expected a data set, got none; add --dataset")
    _find_trainers(study, Path(folders["nnUNet_results"]))
    surface = ", ".join(metric for metric in study.metrics if metric != "dice")
    if surface and find_spec("monai") is None:
        warnings.warn(
            f"metrics: the report needs MONAI for {surface}; run pip install 'nnunet-cpr[surface]' "
            "before study report",
            stacklevel=2,
        )
    steps = [
        step
        for dataset, plans in product(study.datasets, study.plans)
        for step in _preparation_steps(dataset, plans, study.configurations, folders, processes)
    ]
    for dataset in study.datasets:
        _check_folds(study, dataset, folders)
    return steps


def prepare_study_data(study: Study, folders: Mapping[str, str], logs: Path, processes: int) -> None:
    """Plan, preprocess and split the data sets with nnU-Net where this has not been done.

    Args:
        study: a study that :func:`check_study_data` accepts.
        folders: nnU-Net's folders by the names of their environment variables.
        logs: folder for the logs of nnU-Net's commands.
        processes: number of parallel processes.

    Raises:
        StudyError: a data set, its plans or a fold is missing.
        CommandFailed: nnU-Net's planning or preprocessing failed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "nnUNet_n_proc_DA"} | dict(folders)
    preprocessed = Path(folders["nnUNet_preprocessed"])

    def steps(dataset: str) -> Iterator[Step]:
        for plans in study.plans:
            yield from _preparation_steps(dataset, plans, study.configurations, folders, processes)

    for dataset in study.datasets:
        if next(steps(dataset), None) is not None or not (preprocessed / dataset / SPLITS).exists():
            with FileLock(preprocessed / f".{dataset}.lock"):  # of other studies on the data set
                for step in steps(dataset):
                    run(list(step.command), logs / f"{step.log}.log", environment)
                _split(preprocessed / dataset)
        _check_folds(study, dataset, folders)


def _check_folds(study: Study, dataset: str, folders: Mapping[str, str]) -> None:
    """Check that the folds exist, or will exist in nnU-Net's own split."""
    home = Path(folders["nnUNet_preprocessed"]) / dataset
    splits = home / SPLITS
    count = len(_entries(splits, list)) if splits.exists() else _FOLDS
    for fold in study.folds:
        if fold >= count:
            raise StudyError(f"fold {fold}: {dataset} has folds 0 to {count - 1} only")
    if not splits.exists() and (cases := _training_cases(home, Path(folders["nnUNet_raw"]) / dataset)):
        _check_number_of_cases(splits, len(cases))


def _find_trainers(study: Study, results: Path) -> None:
    """Search the trainers of unfinished runs as nnU-Net does, before the first of them starts."""
    first: dict[str, Run] = {}
    for each in study.runs():
        if each.entry not in first and validation_dice(each.folder(results)) is None:
            first[each.entry] = each
    if not first:
        return  # the search imports nnU-Net, which takes seconds
    # With the seed, which other trainers do not take; the study's names are without it.
    found = missing_trainers(each.trainer for each in first.values())
    missing = {
        entry: found[each.trainer].replace(f"_seed{each.seed}", "")
        for entry, each in first.items()
        if each.trainer in found
    }
    if missing:
        names = "; ".join(f"{name} ({hint})" if hint else name for name, hint in missing.items())
        raise StudyError(
            f"trainers not found by nnU-Net: {names}; for a trainer of your own set {EXTERNAL_TRAINERS} "
            f"to its folder, now {external_trainers()}",
            longest=10_000,
        )


def _preparation_steps(
    dataset: str, plans: str, configurations: Sequence[str], folders: Mapping[str, str], processes: int
) -> Iterator[Step]:
    """Yield the commands that are still to run.

    If the caller runs each before it asks for the next, the new plans are checked, too.
    """
    home = Path(folders["nnUNet_preprocessed"]) / dataset
    file = home / f"{plans}.json"
    raw = Path(folders["nnUNet_raw"]) / dataset
    number = dataset[len("Dataset") :].split("_")[0]
    in_parallel = ("-np", str(processes))
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
        yield Step(
            ("nnUNetv2_extract_fingerprint", "-d", number, "--verify_dataset_integrity", *in_parallel),
            f"{dataset}__fingerprint",
        )
        yield Step(
            ("nnUNetv2_plan_experiment", "-d", number, "-pl", _PLANNERS[plans]),
            f"{dataset}__{plans}__plan",
        )
    for configuration in configurations:
        if not file.exists() or not _is_preprocessed(home, file, configuration):
            yield Step(
                ("nnUNetv2_preprocess", "-d", number, "-plans_name", plans, "-c", configuration)
                + in_parallel,
                f"{dataset}__{plans}__{configuration}__preprocess",
            )


def _is_preprocessed(home: Path, plans: Path, configuration: str) -> bool:
    """Return True if every case with a label in ``gt_segmentations`` is preprocessed."""
    known = _entries(plans, dict).get("configurations")
    if not isinstance(known, dict) or not all(isinstance(each, dict) for each in known.values()):
        raise _damaged(plans, "no configurations")
    if configuration not in known:
        raise StudyError(
            f"{home.name}: unknown configuration {configuration} of {plans.stem}; choose from "
            f"{', '.join(known)}"
        )
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


def _cases(folder: Path, subfolder: str = "gt_segmentations") -> list[str]:
    """Return the names of the files in a subfolder, without the ending."""
    description = folder / "dataset.json"
    ending = _entries(description, dict).get("file_ending")
    if not isinstance(ending, str):
        raise _damaged(description, "no file_ending")
    files = sorted((folder / subfolder).glob(f"*{ending}"))
    return sorted(path.name.removesuffix(ending) for path in files)


def _training_cases(home: Path, raw: Path) -> set[str]:
    """Return the names of the cases that will be in ``gt_segmentations`` after the preprocessing."""
    cases = set(_cases(home)) if (home / "gt_segmentations").is_dir() else set()
    description = raw / "dataset.json"
    if description.exists():
        listed = _entries(description, dict).get("dataset")  # cases with files elsewhere
        if isinstance(listed, dict):
            return cases.union(listed)
        images = {name[: -len("_0000")] for name in _cases(raw, "imagesTr")}
        cases |= images.intersection(_cases(raw, "labelsTr"))
    return cases


def _check_number_of_cases(splits: Path, count: int) -> None:
    if count < _FOLDS:
        raise StudyError(
            f"{splits.parent.name}: expected at least {_FOLDS} training cases for nnU-Net's {_FOLDS} "
            f"folds, got {count}; write a split of your own to {splits}"
        )


def _split(home: Path) -> None:
    """Write nnU-Net's own split before concurrent trainings could write the file at the same time."""
    file = home / SPLITS
    if file.exists():
        return
    from nnunetv2.utilities.crossval_split import generate_crossval_split

    cases = _cases(home)
    _check_number_of_cases(file, len(cases))
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
