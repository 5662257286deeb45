"""Drawing of cpr_progress.png."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from nnunet_cpr.nnunet import progress_figure
from nnunet_cpr.nnunet.history import History
from nnunet_cpr.nnunet.progress_figure import draw_progress
from tests.helpers.histories import history_of


def training(folder: Path, epochs: int = 12, matrices: int = 5, first: int | None = 4) -> History:
    """Return the history of a training that keeps the bound, whose last parameter never changes."""
    time = np.arange(epochs)
    noise = np.random.default_rng(0).normal(0, 0.004, (matrices, epochs))
    measure = np.minimum(0.5 + time / 10, 1) * (1 + noise)
    measure[-1] = 0.7
    kappa = np.full(epochs, np.inf) if first is None else np.where(time < first, np.inf, 1.0)
    multiplier = np.where(np.isfinite(kappa), 1e-4, 0) * np.ones((matrices, 1))
    multiplier[-1] = 0
    return history_of(measure, kappa, multiplier, folder)


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Return a figure on which the next drawing takes place."""
    drawn = Figure(layout="constrained")

    @contextmanager
    def on_it(target: Path, size: tuple[float, float], *style: object) -> Iterator[Figure]:
        drawn.set_size_inches(size)
        yield drawn

    monkeypatch.setattr(progress_figure, "new_figure", on_it)
    return drawn


def test_figure_shows_verdict_bound_and_unchanged_parameters(figure: Figure, tmp_path: Path) -> None:
    draw_progress(training(tmp_path))
    assert figure.get_suptitle() == (
        "OK: bounds active and held: all 4 matrices active, R / bound 0.999 to 1.007 "
        "(1 that never changed not counted)"
    )
    top, bottom, *_ = figure.axes
    labels = [label.get_text() for label in top.get_yticklabels()]
    assert labels[-1] == "encoder.stages.4.conv (never changes)" and labels[0] == "encoder.stages.0.conv"
    assert [line.get_xdata()[0] for line in bottom.lines] == [3.5]
    shown = top.images[0].get_array()
    assert shown.mask[-1].all() and not shown.mask[:-1].any()
    assert bottom.images[0].get_array().mask[:, :4].all(), "a multiplier before the bound is set"


@pytest.mark.parametrize(("epochs", "matrices", "first"), [(1, 3, None), (1, 3, 0), (100, 70, 99)])
def test_figure_is_drawn_without_warnings(
    tmp_path: Path, epochs: int, matrices: int, first: int | None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_progress(training(tmp_path, epochs, matrices, first))
    assert imread(tmp_path / "cpr_progress.png").std() > 0.05
