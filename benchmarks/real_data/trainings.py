"""Dice of each training of a finished study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from nnunet_cpr.names.trainer_name import TrainerName, parse_trainer_name
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.results import RUN, UNSEEDED, run_means
from nnunet_cpr.studies.study_file import load


def read_trainings(
    study: str, results: Path, describe: Callable[[TrainerName, str], dict[str, Any]]
) -> pd.DataFrame:
    """Return the columns of ``RUN``, and ``dice`` in percent, of each training that is finished.

    Args:
        study: study file.
        results: nnU-Net's ``nnUNet_results``.
        describe: function that returns further columns, given the name and the label of a trainer.
    """
    definition = load(study)
    means = run_means(read_results(definition, results).cases)
    means["dice"] *= 100
    rows = []
    for run in definition.runs():
        name = parse_trainer_name(run.entry)
        assert name is not None, run.entry
        columns = describe(name, definition.entry(run.entry).title)
        key = {
            "dataset": run.dataset,
            "configuration": run.configuration,
            "plans": run.plans,
            "trainer": run.entry,
            "fold": run.fold,
            "seed": UNSEEDED if run.seed is None else run.seed,
        }
        rows.append({**key, **columns})
    return pd.DataFrame(rows).merge(means, on=RUN, validate="one_to_one")
