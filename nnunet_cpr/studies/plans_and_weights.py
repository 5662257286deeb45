"""Plans of nnU-Net and pretrained weights that the runs of a study are made from, which must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nnunet_cpr.files import read_json
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, is_complete_checkpoint
from nnunet_cpr.nnunet.run_record import (
    RunRecord,
    configuration_of,
    describe_weights,
    new_record,
    record_of,
)
from nnunet_cpr.nnunet.seen_cases import describe_origin
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.state import StudyPaths, cases_of_fold, finished, parse_trainer
from nnunet_cpr.studies.study import Run, Study


def check_plans(study: Study, folders: Mapping[str, str]) -> None:
    """Check that the runs that exist had the plans that those to be trained will have.

    Args:
        study: the study.
        folders: nnU-Net's folders; plans that do not exist yet are not checked.

    Raises:
        Refusal: plans have changed since a run began.
    """
    paths, runs = StudyPaths.of(study.name, folders), list(study.runs())
    unfinished = {_place(run) for run in runs if finished(run, paths) is None}
    for run in runs:
        file = Path(folders["nnUNet_preprocessed"]) / run.dataset / f"{run.plans}.json"
        if _place(run) not in unfinished or not file.exists() or begins(run, paths):
            continue
        model = run.folder(paths.results).parent
        if changed := _differences(_read(file, run), record_of(run.folder(paths.results)).plans):
            raise Refusal(
                f"{file}: {', '.join(changed)} of {run.configuration} changed since {model.name} was "
                "trained",
                "restore them, give the new plans another name, or move the runs away",
            )


def with_other_plans(runs: Iterable[Run], results: Path) -> Iterator[tuple[Run, str]]:
    """Yield the runs whose plans differ from those of the first with the same name, and in what."""
    first: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for run in runs:
        own = record_of(run.folder(results)).plans
        known = first.setdefault(_place(run), own) if own else own
        if changed := ", ".join(_differences(known, own)):
            yield run, changed


def with_other_training(runs: Iterable[Run], results: Path) -> Iterator[tuple[Run, str]]:
    """Yield the runs that trained something else than the first with the same entry, and what.

    A user's class may have changed between them.
    """
    first: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for run in runs:
        own = dict(record_of(run.folder(results)).training)
        own.pop("seed", None)
        place = (*_place(run), run.entry)
        known = first.setdefault(place, own) if own else own
        if changed := ", ".join(_differences(known, own)):
            yield run, changed


def with_other_cases(
    runs: Iterable[Run], results: Path, splits: Callable[[Run], Mapping[str, list[str]]]
) -> Iterator[tuple[Run, str]]:
    """Yield the runs that were made from other cases than those of their fold, and which.

    Args:
        runs: the runs of a study.
        results: ``nnUNet_results``.
        splits: function that returns the cases of a run's fold, ``train`` and ``val``, none if unknown.
    """
    for run in runs:
        expected = RunRecord(split=splits(run))
        if changed := "; ".join(
            expected.differences(RunRecord(split=record_of(run.folder(results)).split))
        ):
            yield run, changed


def with_seen_cases(
    runs: Iterable[Run], results: Path, splits: Callable[[Run], Mapping[str, list[str]]]
) -> Iterator[tuple[Run, str]]:
    """Yield the runs whose pretrained weights have seen validation cases, and how many.

    Cases are known by their data set and id, or by equal images, where the record of the weights has
    those that they were trained on.
    """
    for run in runs:
        record, weights = record_of(run.folder(results)), run.weights(results)
        if not record.split:
            split, given = splits(run), {}
            if weights is not None:
                given = describe_origin(weights, "", run.dataset, split.get("val", ()))
            record = RunRecord(dataset=run.dataset, split=split, weights=given)
        if seen := record.leaked:
            yield (
                run,
                f"its pretrained weights were trained on {len(seen)} of the {len(record.split['val'])} "
                f"validation cases, such as {seen[0]}",
            )


def _place(run: Run) -> tuple[str, str, str]:
    return run.dataset, run.plans, run.configuration


def _read(file: Path, run: Run) -> dict[str, Any]:
    """Return the settings of a run's configuration, empty if a file is missing or unreadable."""
    try:
        return configuration_of(read_json(file), run.configuration)
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ; other versions of nnU-Net have more or fewer."""
    return [key for key in one if key in other and one[key] != other[key]]


def begins(run: Run, paths: StudyPaths) -> bool:
    """Return True if a run has no checkpoint and is not finished, so that its training begins anew."""
    fold = run.folder(paths.results)
    has_checkpoint = any(is_complete_checkpoint(fold / name) for name in CHECKPOINTS)
    return not has_checkpoint and finished(run, paths) is None


def record_run(run: Run, paths: StudyPaths) -> None:
    """Record what a run that begins now is made from; a trainer of this package replaces the record.

    Raises:
        OSError: it cannot be written.
    """
    from nnunet_cpr.nnunet.parts.weights import sha256  # imports torch

    weights, plans = run.weights(paths.results), {}
    if paths.preprocessed is not None:
        plans = _read(paths.preprocessed / run.dataset / f"{run.plans}.json", run)
    given: dict[str, Any] | None = {} if weights is None else None
    split = cases_of_fold(run, paths.splits, paths.preprocessed)
    if weights is not None and weights.is_file():  # else nnU-Net refuses it
        given = describe_origin(weights, sha256(weights), run.dataset, split.get("val", ()))
    fold = run.folder(paths.results)
    fold.mkdir(parents=True, exist_ok=True)
    new_record(run.trainer, dataset=run.dataset, plans=plans, split=split, weights=given).write(fold)


def check_pretrained(study: Study, folders: Mapping[str, str]) -> None:
    """Check that each run begins, or began, with the weights that its entry gives.

    Whether they fit its network is found when they are loaded.

    Raises:
        Refusal: a checkpoint is missing, cannot be read, or is not the one with which a run began.
    """
    paths = StudyPaths.of(study.name, folders)
    results = paths.results
    for run, difference in with_other_weights(study.runs(), results):
        raise Refusal(f"{run.folder(results)}: {difference}")
    needed: set[Path] = set()
    for run in filter(lambda run: begins(run, paths), study.runs()):
        ours = parse_trainer(run.trainer)
        if weights := run.weights(results):
            needed.add(weights)
        elif ours is not None and ours.pretrained is not None:
            raise Refusal(f"{run.entry}: expected an entry 'pretrained' with a checkpoint, got none")
    by_file: dict[Path, str] = {}
    for entry in filter(lambda entry: entry.pretrained, study.trainers):
        file = (results / Path(entry.pretrained).expanduser()).resolve()
        if (first := by_file.setdefault(file, entry.pretrained)) != entry.pretrained:
            raise Refusal(
                f"pretrained: {first} and {entry.pretrained} are one file",
                "write it in one way, as runs that begin with it are found by what is written",
            )
    for weights in sorted(needed):
        _check_file(weights)


def _check_file(weights: Path) -> None:
    """Check that pretrained weights can be read."""
    from nnunet_cpr.nnunet import checkpoints  # imports torch

    if not weights.is_file():
        raise Refusal(
            f"pretrained: expected a checkpoint, got no file {weights}",
            "write an absolute path, or one from nnUNet_results",
        )
    try:
        checkpoints.read(weights, needed=("network_weights",))
    except Refusal as error:
        raise Refusal(f"pretrained: {error}") from error


def with_other_weights(runs: Iterable[Run], results: Path) -> Iterator[tuple[Run, str]]:
    """Yield the runs that did not begin with the weights of their entries, and what to do.

    nnU-Net's option lets a training from scratch begin with weights, and files can change.

    Args:
        runs: the runs of a study, of which some may not have begun.
        results: ``nnUNet_results``.
    """
    expected: dict[Path, str] = {}
    for run in runs:
        weights, ours = run.weights(results), parse_trainer(run.trainer)
        if weights is not None:
            if difference := _other_record(run.folder(results), weights, expected):
                yield run, difference
        elif (
            ours is not None
            and ours.pretrained is None
            and (record := record_of(run.folder(results)).weights)
        ):
            yield (
                run,
                "expected a training that began with random weights, got one from "
                f"{describe_weights(record)}; move it away, or give the entry 'pretrained'",
            )


def _other_record(fold: Path, weights: Path, expected: dict[Path, str]) -> str:
    """Return why a fold did not begin with these weights, "" if it did or does not say.

    Args:
        fold: folder of the fold.
        weights: file with the weights, which need not exist any more.
        expected: hash of each file, else that of the first run that began with it; completed here.
    """
    from nnunet_cpr.nnunet.parts.weights import sha256  # imports torch

    record = record_of(fold).weights
    if record is None:
        return ""
    began = record.get("sha256")
    if weights not in expected and (weights.is_file() or began):
        expected[weights] = sha256(weights) if weights.is_file() else str(began)
    if began is not None and began == expected.get(weights):
        return ""
    return (
        f"expected a training that began with {weights} (SHA-256 {expected.get(weights)}), got one from "
        f"{describe_weights(record)}; move it away, or add _pre<Word> with another word to the trainer"
    )
