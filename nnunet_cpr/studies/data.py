"""Planning, preprocessing and splitting of data sets before the first run starts."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock

from nnunet_cpr.files import read_json
from nnunet_cpr.names.training import Training
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES, run
from nnunet_cpr.nnunet.run_record import configuration_of, split_problems
from nnunet_cpr.refusals import Refusal, counted
from nnunet_cpr.spelling import nearest_first
from nnunet_cpr.studies.plans_and_weights import (
    check_plans,
    check_pretrained,
    with_other_cases,
    with_seen_cases,
)
from nnunet_cpr.studies.state import (
    SPLITS,
    StudyPaths,
    cases_of_fold,
    finished,
    parse_trainer,
    write_json,
)
from nnunet_cpr.studies.study import SURFACE_METRICS, Study

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
        Refusal: a needed variable is not set.
    """
    if missing := ", ".join(name for name in needed if not environment.get(name)):
        raise Refusal(f"{missing} not set", "set nnU-Net's environment variables to its folders")
    given = [name for name in FOLDER_VARIABLES if environment.get(name)]
    return {name: str(Path(environment[name]).absolute()) for name in given}


def dataset_name(given: str, folders: Mapping[str, str]) -> str:
    """Return nnU-Net's full name of a data set, which is given by number or name.

    Raises:
        Refusal: no data set has this number, or several have, or the folders are not set.
    """
    if not re.fullmatch("[0-9]{1,9}", given):
        return given
    nnunet_folders(folders)
    pattern = f"Dataset{int(given):03d}_*"
    found = fnmatch.filter(_data_sets(folders), pattern)
    if len(found) != 1:
        raise Refusal(
            f"data set {given}: expected one {pattern} in nnUNet_raw and nnUNet_preprocessed, got "
            f"{', '.join(found) or 'none'}",
            f"choose from {', '.join(_data_sets(folders)) or 'none'}",
        )
    return found[0]


def _data_sets(folders: Mapping[str, str]) -> list[str]:
    """Return the names of the data sets in nnU-Net's folders."""
    parents = [Path(folders[name]) for name in ("nnUNet_raw", "nnUNet_preprocessed")]
    return sorted({path.name for parent in parents for path in parent.glob("Dataset*_*")})


def check_study_data(study: Study, folders: Mapping[str, str], processes: int) -> list[list[str]]:
    """Check a study's trainers, data sets and folds as far as possible without changing a file.

    Returns:
        The commands of nnU-Net that prepare the data.

    Raises:
        Refusal: a folder of nnU-Net, a data set, its plans, a trainer or a fold is missing.
    """
    nnunet_folders(folders)
    if not study.datasets:
        raise Refusal(f"study {study.name}: expected a data set, got none", "add --dataset")
    paths = StudyPaths.of(study.name, folders)
    _find_trainers(study, paths)
    commands = [
        _preparation_command(study, folders, processes, dataset, plans)
        for dataset, plans in product(study.datasets, study.used_plans)
    ]
    for dataset in study.datasets:
        _check_folds(study, dataset, folders)
        home, raw = (Path(folders[name]) / dataset for name in ("nnUNet_preprocessed", "nnUNet_raw"))
        if not (home / SPLITS).exists():
            _check_case_count(home, _planned_cases(raw / "dataset.json"))
    check_plans(study, folders)
    check_pretrained(study, folders)
    check_cases(study, folders)
    return [command for command in commands if command]


def prepare_study_data(study: Study, folders: Mapping[str, str], logs: Path, processes: int) -> None:
    """Plan, preprocess and split the data sets with nnU-Net where this has not been done.

    Args:
        study: a study that :func:`check_study_data` accepts.
        folders: nnU-Net's folders by the names of their environment variables.
        logs: folder for the logs of nnU-Net's commands.
        processes: number of parallel processes.

    Raises:
        Refusal: a data set, its plans or a fold is missing, or nnU-Net's planning or preprocessing
            failed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "nnUNet_n_proc_DA"} | dict(folders)
    preprocessed = Path(folders["nnUNet_preprocessed"])
    for dataset in study.datasets:
        command = partial(_preparation_command, study, folders, processes, dataset)
        if any(map(command, study.used_plans)) or not (preprocessed / dataset / SPLITS).exists():
            with FileLock(preprocessed / f".{dataset}.lock"):  # of other studies on the data set
                for plans in study.used_plans:
                    if needed := command(plans):
                        run(needed, logs / f"{dataset}__{plans}__prepare.log", environment)
                        command(plans)  # refuses configurations that the new plans do not have
                _split(preprocessed / dataset, study)
        _check_folds(study, dataset, folders)


def check_splits(study: Study, folders: Mapping[str, str], record: Path) -> None:
    """Check that the folds are those with which a study began, and record those of new data sets.

    Args:
        study: the study, whose data are prepared.
        folders: nnU-Net's folders.
        record: the study's own file of the folds by data set.

    Raises:
        Refusal: a ``splits_final.json`` has changed.
    """
    recorded = read_json(record) if record.exists() else {}
    for dataset in study.datasets:
        file = Path(folders["nnUNet_preprocessed"]) / dataset / SPLITS
        splits = read_json(file)
        if recorded.setdefault(dataset, splits) != splits:
            raise Refusal(
                f"{file}: has changed since study {study.name} began",
                f"restore it, or delete the study's runs of {dataset} and {record}",
            )
    write_json(record, recorded)


def check_cases(study: Study, folders: Mapping[str, str]) -> None:
    """Check that the runs that exist were trained and validated on the cases of their folds.

    Args:
        study: the study.
        folders: nnU-Net's folders; folds that no file has yet are not checked.

    Raises:
        Refusal: a run was made from other cases.
    """
    paths = StudyPaths.of(study.name, folders)
    cases = partial(cases_of_fold, recorded=paths.splits, preprocessed=paths.preprocessed)
    for other, difference in with_other_cases(study.runs(), paths.results, cases):
        raise Refusal(
            f"{other.folder(paths.results)}: its cases are not those of fold {other.fold} of "
            f"{other.dataset}: {difference}",
            f"move it away, or restore the {SPLITS} that it was trained with",
        )


def seen_cases(study: Study, paths: StudyPaths) -> Iterator[str]:
    """Yield a line for each run whose pretrained weights have seen validation cases."""
    cases = partial(cases_of_fold, recorded=paths.splits, preprocessed=paths.preprocessed)
    for tuned, seen in with_seen_cases(study.runs(), paths.results, cases):
        yield f"{tuned.key}: {seen}; it says nothing of new cases, and the report has no verdict on it"


def notes(study: Study) -> Iterator[str]:
    """Yield a line for each trainer without effect or in twice, and for a metric without its package."""
    spelled: dict[tuple[Any, ...], str] = {}
    for entry in study.trainers:
        training = _training(entry.trainer)
        if training is None:
            continue
        made_from = training, entry.pretrained, entry.plans, entry.configuration
        same = spelled.setdefault(made_from, entry.key)
        if same != entry.key:
            yield f"{entry.key}: the same training as {same}, spelled differently; leave one out"
        if training.kappa is not None and training.is_never_bounded:
            yield (
                f"{entry.trainer}: its bounds would be set at step {training.kappa.earliest:,}, but it "
                f"trains {counted(training.steps, 'step')}: no matrix is regularized; choose a smaller "
                "_ws<N>"
            )
    if {*study.metrics} & {*SURFACE_METRICS} and find_spec("monai") is None:
        yield (
            f"metrics {', '.join(study.metrics)}: MONAI is not installed, so the report will have Dice "
            "only; run: pip install 'nnunet-cpr[surface]'"
        )


def _training(trainer: str) -> Training | None:
    """Return all that a trainer's name trains, None for a trainer that is not from this package."""
    name = parse_trainer(trainer)
    if name is None or name.on is None:
        return None if name is None else name.training
    from nnunet_cpr.nnunet.tools.explain_name import training_of  # imports nnU-Net

    return training_of(trainer)


def _find_trainers(study: Study, paths: StudyPaths) -> None:
    """Search the trainers of unfinished runs as nnU-Net does, before the first of them starts."""
    unfinished = [each for each in study.runs() if finished(each, paths) is None]
    # With one of its seeds, as other trainers take none; the study's names are without it.
    by_entry = {each.entry: each.trainer for each in unfinished}
    find_trainers(by_entry.values(), bool(study.seeds))


def find_trainers(names: Collection[str], has_seeds: bool) -> None:
    """Search trainers as nnU-Net does.

    Raises:
        Refusal: it does not find all of them.
    """
    if not names:
        return
    from nnunet_cpr.nnunet.classes import missing_trainers  # imports nnU-Net

    if missing := missing_trainers(names):
        described = "; ".join(f"{name} ({hint})" if hint else name for name, hint in missing.items())
        # As the entry has to be written, without what the study appends.
        described = re.sub(r"(write \S*?)(?:_pre[0-9a-f]{8})?(?:_seed[0-9]+)", r"\1", described)
        described = re.sub(r"(write \S*?)_pre[0-9a-f]{8}", r"\1", described)
        appended = "; the study appends _seed<N>" if has_seeds else ""
        raise Refusal(
            f"trainers not found by nnU-Net: {described}{appended}",
            "for a trainer of your own set nnUNet_extTrainer to its folder, now "
            f"{os.environ.get('nnUNet_extTrainer') or 'not set'}",
        )


def _preparation_command(
    study: Study, folders: Mapping[str, str], processes: int, dataset: str, plans: str
) -> list[str]:
    """Return the command that is needed before trainings with these plans, or an empty list."""
    home = Path(folders["nnUNet_preprocessed"]) / dataset
    number = dataset[len("Dataset") :].split("_")[0]
    in_parallel = ["-np", str(processes)]
    if (home / f"{plans}.json").exists():
        labels = list((home / "gt_segmentations").glob("[!.]*"))
        missing = [
            configuration
            for configuration in study.used_plans[plans]
            if not 0 < len(_preprocessed_cases(home, plans, configuration)) == len(labels)
        ]
        command = ["nnUNetv2_preprocess", "-d", number, "-plans_name", plans, "-c", *missing]
        return [*command, *in_parallel] if missing else []
    raw = Path(folders["nnUNet_raw"])
    if not (raw / dataset / "dataset.json").exists():
        if not raw.is_dir():
            raise Refusal(f"nnUNet_raw: {raw} does not exist", f"run: mkdir -p {shlex.quote(str(raw))}")
        others = ", ".join(nearest_first(f"Dataset000_{dataset}", _data_sets(folders)))
        raise Refusal(
            f"{dataset}: not found in nnUNet_raw, which has {others or 'no data set'}",
            "put it there in nnU-Net's raw format (nnunet-cpr prepare converts archives of challenges)",
        )
    if plans not in _PLANNERS:
        written = sorted(path.stem for path in home.glob("*Plans*.json"))
        known = ", ".join(nearest_first(plans, dict.fromkeys([*written, *_PLANNERS])))
        raise Refusal(
            f"{dataset}: no plans {plans}",
            f"choose from {known}, or run nnUNetv2_plan_experiment to write {home / f'{plans}.json'}",
        )
    command = ["nnUNetv2_plan_and_preprocess", "-d", number, "-pl", _PLANNERS[plans], "-c"]
    command += [*study.used_plans[plans], "--verify_dataset_integrity", "-npfp", str(processes)]
    return command + in_parallel


def _preprocessed_cases(home: Path, plans: str, configuration: str) -> list[str]:
    """Return the names of the cases that are preprocessed for a configuration."""
    written = read_json(home / f"{plans}.json")
    if configuration not in (known := written["configurations"]):
        raise Refusal(
            f"{home.name}: unknown configuration {configuration} of {plans}",
            f"choose from {', '.join(known)}",
        )
    folder = home / configuration_of(written, configuration)["data_identifier"]
    return sorted(path.stem for path in folder.glob("*.pkl"))


def _check_folds(study: Study, dataset: str, folders: Mapping[str, str]) -> None:
    """Check that the folds exist, or will exist in nnU-Net's own split, and have cases of their own."""
    home = Path(folders["nnUNet_preprocessed"]) / dataset
    count = count_folds(home)
    if (last := max(study.folds)) >= count:
        raise Refusal(f"fold {last}: {dataset} has folds 0 to {count - 1} only")
    if not (home / SPLITS).exists():
        return
    known, splits = _case_ids(home), read_json(home / SPLITS)
    for fold in study.folds:
        try:
            split = {part: list(map(str, splits[fold][part])) for part in ("train", "val")}
        except (LookupError, TypeError) as error:
            raise Refusal(
                f"{home / SPLITS}: expected train and val of fold {fold}, got {error!r}"
            ) from error
        unknown = sorted({*split["train"], *split["val"]} - known) if known else []
        if unknown:
            raise Refusal(
                f"{home / SPLITS}: fold {fold} has {counted(len(unknown), 'unknown case')}, such as "
                f"{unknown[0]}",
                f"write ids without endings, such as {min(known)}",
            )
        for problem in split_problems(split):
            raise Refusal(f"{home / SPLITS}, fold {fold}: {problem}", "correct the fold")


def _case_ids(home: Path) -> set[str]:
    """Return the ids of the cases of a preprocessed data set, none before nnU-Net has planned it."""
    if not (home / "dataset.json").exists():
        return set()
    ending = read_json(home / "dataset.json")["file_ending"]  # ids may have dots
    return {path.name.removesuffix(ending) for path in (home / "gt_segmentations").glob("[!.]*")}


def count_folds(home: Path) -> int:
    """Return the number of folds of a preprocessed data set, or of nnU-Net's own split."""
    splits = home / SPLITS
    try:
        return len(read_json(splits)) if splits.exists() else _FOLDS
    except ValueError as error:  # users may write the file
        raise Refusal(f"{splits}: expected a list of folds, got: {error}") from error


def _split(home: Path, study: Study) -> None:
    """Write nnU-Net's own split before concurrent trainings could write the file at the same time."""
    if (home / SPLITS).exists():
        return
    from nnunetv2.utilities.crossval_split import generate_crossval_split

    plans, configurations = next(iter(study.used_plans.items()))
    cases = _preprocessed_cases(home, plans, configurations[0])
    _check_case_count(home, len(cases))
    splits = generate_crossval_split(cases, seed=12345, n_splits=_FOLDS)
    write_json(home / SPLITS, [{k: list(map(str, v)) for k, v in split.items()} for split in splits])


def _planned_cases(description: Path) -> int:
    """Return the number of cases in a ``dataset.json``, enough if nnU-Net's own check will refuse it."""
    try:
        return int(read_json(description)["numTraining"])
    except (OSError, ValueError, LookupError, TypeError):
        return _FOLDS


def _check_case_count(home: Path, count: int) -> None:
    """Check that nnU-Net can split so many cases into its folds."""
    if count < _FOLDS:
        raise Refusal(
            f"{home.name}: expected at least {_FOLDS} training cases for nnU-Net's {_FOLDS} folds, got "
            f"{count}",
            f"write a split of your own to {home / SPLITS}",
        )
