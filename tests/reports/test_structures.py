"""Tables and sizes of structures and cases."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from nnunet_cpr.reports.comparison import judge
from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.pairing import compare_with
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.reports.structures import case_sizes, interval_table, volume_table, voxel_sizes
from tests.reports.folds import study, write_fold, write_volume

CPR, SGD = "nnUNetTrainerCPR", "nnUNetTrainerSGD"
CASES = ["a", "b", "c", "d"]


@pytest.fixture
def part(tmp_path):
    """Results of two trainers, two folds and three seeds, with numbers of voxels."""
    rng = np.random.default_rng(0)
    for trainer, gain in ((SGD, 0.0), (CPR, 0.05)):
        for fold in (0, 1):
            for seed in (1, 2, 3):
                dice = {
                    f"{fold}{case}": {
                        "1": 0.8 + rng.normal(0, 0.01),
                        "2": 0.6 + gain + rng.normal(0, 0.01),
                    }
                    for case in CASES
                }
                run = write_fold(tmp_path, f"{trainer}_seed{seed}", fold, dice)
                summary = json.loads((run / "validation" / "summary.json").read_text())
                for number, case in enumerate(summary["metric_per_case"]):
                    for key, metrics in case["metrics"].items():
                        metrics["n_ref"] = 1000 * int(key)
                        metrics["n_pred"] = 1000 * int(key) + 100 * number
                (run / "validation" / "summary.json").write_text(json.dumps(summary))
    planned = study(SGD, CPR, folds=(0, 1), seeds=(1, 2, 3))
    (found,) = read_results(planned, tmp_path).by_condition()
    return found


def test_interval_of_a_structure_is_that_of_its_comparison_alone(part) -> None:
    compared = choose_compared(part)
    table = interval_table(compared, METRICS["dice"])
    assert table is not None and [*table.cells.columns] == ["liver", "left_kidney"]
    assert [*table.cells.index] == [CPR]
    (both,) = judge(compare_with([compared], SGD))
    text = table.cells.loc[CPR, "left_kidney"]
    middle = float(text.split(" ")[0])
    assert 4 < middle < 6 and both.gain == pytest.approx(
        np.mean([middle, float(table.cells.loc[CPR, "liver"].split(" ")[0])]), abs=0.01
    )
    low, high = (float(end) for end in text.split("(")[1].strip(")").split(" to "))
    assert low < middle < high and low > 0


def test_volumes_are_in_ml_where_segmentations_are_there(part, tmp_path) -> None:
    """The predictions have 0, 100, 200 and 300 voxels too many."""
    assert volume_table(part, voxel_sizes(part)) is None
    sizes, unit = case_sizes(part, voxel_sizes(part))
    assert unit == "voxels" and set(sizes) == {3000.0}
    for fold in (0, 1):
        for case in CASES:
            run = part.run(fold, CPR, 2).folder(tmp_path) / "validation"
            write_volume(np.zeros((4, 4, 4), np.uint8), run / f"{fold}{case}.nii.gz")
    voxel = voxel_sizes(part)
    table = volume_table(part, voxel)
    errors = np.tile(np.arange(4) * 100 * voxel.iloc[0], 6)
    expected = [errors.mean(), *(errors.mean() + side * 1.96 * errors.std(ddof=1) for side in (-1, 1))]
    assert table is not None
    assert table.cells.loc[CPR, "liver"] == "{:+.2f} ({:+.2f} to {:+.2f})".format(*expected)
    sizes, unit = case_sizes(part, voxel)
    assert unit == "ml" and sizes.tolist() == pytest.approx([3000 * voxel.iloc[0]] * 8)


def test_cases_without_any_structure_have_no_sizes(part) -> None:
    """A figure with logarithmic sizes could not show one of them."""
    empty = replace(part, cases=part.cases.assign(true_voxels=0))
    assert case_sizes(empty, voxel_sizes(part)) is None
