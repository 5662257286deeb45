"""Plans with which runs were trained: those of one name should be one network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nnunet_cpr.files import read_json
from nnunet_cpr.studies.definition import Run, Study, StudyError
from nnunet_cpr.studies.pretraining import begins
from nnunet_cpr.studies.run_state import StudyPaths, finished

_KEPT = "plans.json"
"""File in which nnU-Net keeps the plans of a model, beside its folds."""


def resolve(plans: Mapping[str, Any], configuration: str) -> dict[str, Any]:
    """Return the settings of a configuration with those that it inherits.

    Raises:
        LookupError: the plans do not have the configuration.

    Example:
        >>> low, high = {"batch_size": 2, "spacing": [2]}, {"inherits_from": "low", "spacing": [1]}
        >>> resolve({"configurations": {"low": low, "high": high}}, "high")
        {'batch_size': 2, 'spacing': [1]}
    """
    own = dict(plans["configurations"][configuration])
    inherited = own.pop("inherits_from", None)
    return own if inherited is None else {**resolve(plans, inherited), **own}


def check_plans(study: Study, folders: Mapping[str, str]) -> None:
    """Check that the runs that exist had the plans that those to be trained will have.

    Args:
        study: the study.
        folders: nnU-Net's folders; plans that do not exist yet are not checked.

    Raises:
        StudyError: plans have changed since a run began.
    """
    paths, runs = StudyPaths.of(study.name, folders), list(study.runs())
    unfinished = {_place(run) for run in runs if finished(run, paths) is None}
    for run in runs:
        file = Path(folders["nnUNet_preprocessed"]) / run.dataset / f"{run.plans}.json"
        if _place(run) not in unfinished or not file.exists() or begins(run, paths):
            continue
        model = run.folder(paths.results).parent
        if changed := _differences(_read(file, run), _read(model / _KEPT, run)):
            raise StudyError(
                f"{file}: {', '.join(changed)} of {run.configuration} changed since {model.name} was "
                "trained; restore them, give the new plans another name, or move the runs away"
            )


def with_other_plans(runs: Iterable[Run], results: Path) -> Iterator[tuple[Run, str]]:
    """Yield the runs whose plans differ from those of the first with the same name, and in what."""
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    by_model: dict[Path, str] = {}
    for run in runs:
        model = run.folder(results).parent
        if model not in by_model:
            own = _read(model / _KEPT, run)
            known = first.setdefault(_place(run), own) if own else own
            by_model[model] = ", ".join(_differences(known, own))
        if by_model[model]:
            yield run, by_model[model]


def _place(run: Run) -> tuple[str, str, str]:
    return run.dataset, run.plans, run.configuration


def _read(file: Path, run: Run) -> dict[str, Any]:
    """Return the settings of a run's configuration, empty if a file is missing or unreadable."""
    try:
        return resolve(read_json(file), run.configuration)
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ; other versions of nnU-Net have more or fewer."""
    return [key for key in one if key in other and one[key] != other[key]]
