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
from nnunet_cpr.nnunet.progress_figure import draw_progress, multiplier_scale, ratio_scale
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


def test_ratio_colours_are_neutral_near_the_bound() -> None:
    colours, norm = ratio_scale()
    near, above, far = (colours(norm([value]))[0][:3] for value in (1.004, 1.3, 5.0))
    assert np.ptp(near) < 0.02 and near.min() > 0.9, "a ratio of 1.004 looks alarming"
    assert (colours(norm([0.996]))[0][:3] == near).all()
    assert np.ptp(above) < np.ptp(far) and far[0] > 0.5 and far[1] < 0.1, "five times the bound does not"
    assert (colours(norm([2.0]))[0][:3] == far).all()


def test_multiplier_colours_are_logarithmic_and_white_for_zero() -> None:
    colours, norm = multiplier_scale()
    values = [0, 1e-9, 2e-6, 2e-4, 2e-2, 0.9, 100]
    brightness = colours(norm(values))[:, :3].mean(axis=1)
    assert (brightness[:2] == 1).all() and (np.diff(brightness[1:]) < 0).all()


def test_figure_shows_verdict_bound_and_unchanged_parameters(figure: Figure, tmp_path: Path) -> None:
    draw_progress(training(tmp_path))
    assert figure.get_suptitle() == (
        "OK: bounds active and held: all 4 matrices active, R / bound 0.999 to 1.007 "
        "(1 that never changed not counted)"
    )
    top, middle, bottom, *_ = figure.axes
    labels = [label.get_text() for label in top.get_yticklabels()]
    assert labels[-1] == "encoder.stages.4.conv (never changes)" and labels[0] == "encoder.stages.0.conv"
    assert bottom.get_title().endswith("dashed: bounds set in epoch 4")
    assert [line.get_xdata()[0] for line in middle.lines] == [3.5]
    shown = top.images[0].get_array()
    assert shown.mask[-1].all() and not shown.mask[:-1].any()
    assert middle.images[0].get_array().mask[:, :4].all(), "a multiplier before the bound is set"
    assert bottom.get_ylim() == (0, 2), "the scale does not depend on the training"


@pytest.mark.parametrize(
    ("epochs", "matrices", "first"), [(1, 3, None), (1, 3, 0), (3, 2, 1), (100, 70, 99), (12, 1, 4)]
)
def test_figure_is_drawn_without_warnings(
    tmp_path: Path, epochs: int, matrices: int, first: int | None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_progress(training(tmp_path, epochs, matrices, first))
    assert imread(tmp_path / "cpr_progress.png").std() > 0.05


def test_failed_figure_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = training(tmp_path)
    draw_progress(history)
    before = (tmp_path / "cpr_progress.png").read_bytes()

    def full_disk(figure: Figure, path: Path, dpi: int) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full_disk)
    with pytest.raises(OSError, match="No space"):
        draw_progress(history)
    assert (tmp_path / "cpr_progress.png").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
