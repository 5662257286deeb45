"""Figures of the documentation, and the script that draws them."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers import ROOT
from tests.helpers.pages import DOCS

SCRIPT = DOCS / "scripts" / "figures.py"


def draw(output: Path, *names: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(output), *names],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def pixels(figure: Path) -> np.ndarray:
    with Image.open(figure) as image:
        return np.asarray(image.convert("RGB"), float)


def test_every_figure_has_its_command() -> None:
    figures = {path.stem for path in (DOCS / "figures").glob("*.png")}
    assert figures == {*runpy.run_path(str(SCRIPT))["FIGURES"]}


@pytest.mark.release
def test_figures_are_those_of_their_commands(tmp_path: Path) -> None:
    """Pictures of pages depend on the machine's fonts."""
    pages = {"study_result"}
    names = {*runpy.run_path(str(SCRIPT))["SIMPLE"]} - pages
    draw(tmp_path, *names)
    for name in names:
        drawn, committed = pixels(tmp_path / f"{name}.png"), pixels(DOCS / "figures" / f"{name}.png")
        assert drawn.shape == committed.shape, name
        assert np.abs(drawn - committed).mean() < 0.5, f"{name}: run {SCRIPT} {name}"


@pytest.mark.release
@pytest.mark.skipif(
    not (shutil.which("chromium") or shutil.which("google-chrome")), reason="Chromium is not installed"
)
def test_picture_of_a_report_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path, "study_result")
    assert pixels(tmp_path / "study_result.png").std() > 20


@pytest.mark.release
def test_figures_of_trainings_are_drawn(tmp_path: Path) -> None:
    names = runpy.run_path(str(SCRIPT))["TRAINED"]
    draw(tmp_path, *names)
    assert all(pixels(tmp_path / f"{name}.png").std() > 20 for name in names)
