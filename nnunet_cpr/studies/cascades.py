"""Previous stage of nnU-Net's cascade: the runs and the files that its runs need first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from nnunet_cpr.files import read_json
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.data import count_folds
from nnunet_cpr.studies.state import SPLITS, StudyPaths
from nnunet_cpr.studies.study import Run, Study

_USUAL_STAGES = {"3d_cascade_fullres": {"previous_stage": "3d_lowres"}}
"""Configurations of nnU-Net's own plans with a previous stage."""


def prerequisites(study: Study, folders: Mapping[str, str]) -> dict[Run, list[Run]]:
    """Return the runs of a cascade's previous stage that each of its runs needs, by run.

    nnU-Net's cascade trains on predictions of its previous stage for all training cases, which the
    validations of the five folds write.

    Args:
        study: the study.
        folders: nnU-Net's folders, with the plans.

    Raises:
        Refusal: the study does not have the previous stage with all folds.
    """
    needed: dict[Run, list[Run]] = {}
    runs = {run.key: run for run in study.runs()}
    for dataset, plans in product(study.datasets, study.used_plans):
        home = Path(folders["nnUNet_preprocessed"]) / dataset
        path = home / f"{plans}.json"
        known = read_json(path)["configurations"] if path.exists() else _USUAL_STAGES
        folds = range(count_folds(home))
        for configuration in study.used_plans[plans]:
            previous = known.get(configuration, {}).get("previous_stage")
            if not previous:
                continue
            for each in runs.values():
                if (each.dataset, each.plans, each.configuration) != (dataset, plans, configuration):
                    continue
                stage = replace(each, configuration=previous)
                keys = [replace(stage, fold=fold).key for fold in folds]
                if not runs.keys() >= {*keys}:
                    raise Refusal(
                        f"{configuration}: needs the predictions of {previous} in all folds of "
                        f"{dataset} by the same trainer",
                        f"write configurations [{previous}, {configuration}] and folds 0-{folds[-1]}, "
                        f"or an entry for {previous}",
                    )
                needed[each] = [runs[key] for key in keys]
    return needed


def runs_without_predictions(run: Run, paths: StudyPaths) -> list[Run]:
    """Return the runs of the previous stage whose predictions for a run's cases are missing.

    The validation of the previous stage writes them beside its folds, so results that were copied or
    cleaned up may lack them.

    Args:
        run: any run; one without a previous stage needs none.
        paths: the study's folders.
    """
    home = (paths.preprocessed or Path()) / run.dataset
    try:
        configurations = read_json(home / f"{run.plans}.json")["configurations"]
        previous = configurations[run.configuration]["previous_stage"]
        folds = [fold["val"] for fold in read_json(home / SPLITS)]
    except (OSError, ValueError, LookupError, TypeError):  # not planned or split
        return []
    stage = replace(run, configuration=previous)
    folder = stage.folder(paths.results).parent / "predicted_next_stage" / run.configuration
    there = {path.stem for path in folder.glob("*")} if folder.exists() else set()
    return [replace(stage, fold=n) for n, cases in enumerate(folds) if not there.issuperset(cases)]
