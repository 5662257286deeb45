"""Tables that describe structures and cases, without verdicts: intervals, volumes, failures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import SimpleITK as sitk

from nnunet_cpr.reports.metrics import Metric, value_text
from nnunet_cpr.reports.pairing import compare_by
from nnunet_cpr.reports.reading import read_dataset_json
from nnunet_cpr.reports.results import FAILED, ConditionResults, failed_cases, unique
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.tables import Table, titled

MAX_NAMES = 10
"""Maximum number of failed cases that are named."""


def interval_table(compared: Compared, metric: Metric) -> Table | None:
    """Return the differences to the reference of each structure, None if there is one structure.

    The intervals are those of :class:`~nnunet_cpr.reports.comparison.Comparison` on the structure
    alone. They describe: nothing is corrected for their number, and none is a verdict.
    """
    results, cells = compared.results, {}
    names = unique(results.cases["class"])
    if len(names) < 2:
        return None
    for name in names:
        own = replace(results, cases=results.cases[results.cases["class"] == name])
        of_class = compare_by(metric, replace(compared, results=own), results.study.reference)
        cells[name] = {
            each.entry.key: _interval(each.difference, each.shown_interval) for each in of_class
        }
    reference = results.study.entry(results.study.reference).full_title
    caption = (
        f"Differences of {metric.title} to {reference} in {metric.difference_unit} with 95 % intervals "
        "of each structure, described without verdicts"
    )
    return Table(caption, titled(results, pd.DataFrame(cells)))


def _interval(middle: float, ends: Sequence[float]) -> str:
    numbers = [value_text(value, "+.2f") for value in (middle, *ends)]
    return numbers[0] if "-" in numbers else "{} ({} to {})".format(*numbers)


def volume_table(results: ConditionResults, sizes: pd.Series) -> Table | None:
    """Return the bias and the limits of agreement of each structure's volume in ml.

    Limits are the mean difference to the ground truth -/+ 1.96 standard deviations over all predictions
    (Bland and Altman, 1986).

    Args:
        results: results of a condition.
        sizes: ml of a voxel by case, of :func:`voxel_sizes`; without cases there is no table.
    """
    cases = results.cases
    wrong = (cases["predicted_voxels"] - cases["true_voxels"]) * cases["case"].map(sizes)
    groups = wrong.groupby([cases["trainer"], cases["class"]], sort=False)
    known = groups.agg(["mean", "std", "count"])
    if not known["count"].any():
        return None
    texts = [
        _interval(mean, (mean - 1.96 * deviation, mean + 1.96 * deviation))
        for mean, deviation, _ in known.itertuples(index=False)
    ]
    cells = pd.Series(texts, known.index).unstack(fill_value="-")[unique(cases["class"])]
    caption = "Volume minus that of the ground truth in ml: bias and 95 % limits of agreement"
    return Table(caption, titled(results, cells))


def voxel_sizes(results: ConditionResults) -> pd.Series:
    """Return the volume of a voxel in ml of each case that has a 3D segmentation in some run."""
    sizes = {}
    runs = results.cases[["case", "trainer", "fold", "seed"]].drop_duplicates()
    for case, trainer, fold, seed in runs.itertuples(index=False):
        if case in sizes:
            continue
        folder = results.run(fold, trainer, seed).folder(results.folder)
        ending = read_dataset_json(folder).get("file_ending", ".nii.gz")
        file = folder / "validation" / f"{case}{ending}"
        if file.is_file():
            reader = sitk.ImageFileReader()
            reader.SetFileName(str(file))
            with suppress(RuntimeError):  # damaged; surface metrics have a note
                reader.ReadImageInformation()
                if reader.GetDimension() == 3:
                    sizes[case] = float(np.prod(reader.GetSpacing())) / 1000
    return pd.Series(sizes, dtype=float)


def case_sizes(results: ConditionResults, sizes: pd.Series) -> tuple[pd.Series, str] | None:
    """Return the size of all structures of each case by (fold, case), and its unit.

    It is in ml where the size of a voxel is known for all cases, else in voxels; None if the results do
    not say how many voxels there are, or there are none.
    """
    of_run = results.cases.groupby(["fold", "case", "trainer", "seed"])["true_voxels"].sum(min_count=1)
    voxels = of_run.groupby(["fold", "case"]).max()
    if not (voxels > 0).any():
        return None
    ml = voxels * voxels.index.get_level_values("case").map(sizes)
    return (voxels, "voxels") if ml.isna().any() else (ml, "ml")


def failed_table(results: ConditionResults) -> Table | None:
    """Return the failed cases of each trainer with their names, None if there are none."""
    failed = failed_cases(results.cases).to_frame(index=False)
    if failed.empty:
        return None
    rows = failed.groupby("trainer")["case"].agg(
        lambda cases: ", ".join(sorted(cases)[:MAX_NAMES]) + (", ..." if len(cases) > MAX_NAMES else "")
    )
    cells = pd.DataFrame({"failed": failed.groupby("trainer").size().astype(str), "cases": rows})
    caption = f"Failed cases: mean Dice over classes below {100 * FAILED:g} % in any run"
    return Table(caption, titled(results, cells))
