"""Figures of a report."""

import math
import re

import numpy as np
import pandas as pd
import pytest

from nnunet_cpr.reports import plots
from nnunet_cpr.reports.results import Setting, read_results
from nnunet_cpr.studies.definition import Run
from tests.helpers.report_folds import DATASET, both, study, write_fold, write_log

SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")


def test_trainer_without_a_value_is_not_among_the_best(tmp_path):
    names = ["Reference", *(f"T{i}" for i in range(plots.MAX_DRAWN + 1))]
    for i, name in enumerate(names):
        value = math.nan if name == "T4" else 0.5 + 0.01 * i
        write_fold(tmp_path, name, 0, {"a": both(value)})
    drawn = plots.drawn_trainers(read_results(study(*names, folds=(0,)), tmp_path, None, None))
    assert [entry.trainer for entry in drawn] == [name for name in names if name != "T4"]


def test_curve_of_a_short_common_part_is_seen(tmp_path):
    """Folds of 1,000 and of 3 epochs have one point in common, a mean of four epochs."""
    for fold, epochs in ((0, 1000), (1, 3)):
        folder = write_fold(tmp_path, "A", fold, {"a": both(0.5)})
        write_log(folder, {epoch: (0.1, 0.2 + fold + epoch, 0.5, 3.0) for epoch in range(epochs)})
    picture = plots.curves(read_results(study("A"), tmp_path, None, None), SETTING, "val_loss")
    assert picture is not None and "first to last epoch: A 0.700 to 2.700" in picture.alt
    assert re.search("<use [^>]*x=", picture.svg), "a line of one point needs a marker"


@pytest.mark.filterwarnings("error")
def test_heat_map_of_a_bound_of_zero_is_drawn():
    history = pd.DataFrame(
        {"epoch": [0, 0], "parameter": ["a", "b"], "measure": [0.0, 2.0], "kappa": [0.0, 1.0]}
    ).assign(step=1, multiplier=np.float32(0.5))
    run = Run(DATASET, "3d_fullres", "nnUNetPlans", 0, "A")
    assert "median 2.0000, from 2.0000 to 2.0000" in plots.heat_maps(SETTING, run, history).ratio.alt
