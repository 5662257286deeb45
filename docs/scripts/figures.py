"""Draw the figures of the documentation: ``python docs/scripts/figures.py [NAME...]``.

Each figure in ``docs/figures`` has its command or function in :data:`FIGURES`. Most follow from the
results that come with the source; some train for minutes. Pictures of reports need Chromium, and that of
the published results ``nnUNet_results`` with them (``docs/how-to/compare-finished-trainings.md``).
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from PIL import Image, ImageChops
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nnunet_cpr.nnunet.history import History
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME, draw_progress
from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.comparison import judge
from nnunet_cpr.reports.figures import draw_differences
from nnunet_cpr.reports.pairing import compare_with
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.studies.study_file import load
from nnunet_cpr.vision.sweep import draw_summary, load_sweep, summarize

STUDIES = ROOT / "benchmarks" / "real_data" / "studies"
SWEEPS = ROOT / "benchmarks" / "vision"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

Draw = Callable[[Path, Path], None]
"""Function that draws a figure: its path, and the folder of the unpacked results."""


def unpack(folder: Path) -> None:
    """Unpack all committed results: runs of studies, and runs of sweeps in folders of their tasks."""
    for place in (ROOT / "benchmarks" / "real_data", SWEEPS):
        for file in sorted((place / "results").glob("*.tar.xz")):
            with tarfile.open(file) as archive:
                archive.extractall(folder, filter="data")


# Ways to draw


def run(module: str, *options: str, studies: Sequence[str] = ()) -> Draw:
    """Return the drawing by a benchmark, on studies whose results are committed."""

    def draw(figure: Path, results: Path) -> None:
        files = [str(STUDIES / f"{study}.yaml") for study in studies]
        command = [sys.executable, "-m", f"benchmarks.{module}", *files, *options]
        environment = {**os.environ, "nnUNet_results": str(results)}
        subprocess.run([*command, "--figure", str(figure)], check=True, cwd=ROOT, env=environment)

    return draw


def script(name: str, *options: str) -> Draw:
    """Return the drawing by a script that trains, and draws several figures."""

    def draw(figure: Path, results: Path) -> None:
        if not figure.exists():  # not drawn with another one
            command = [sys.executable, str(ROOT / "docs" / name), *options]
            subprocess.run([*command, "--output", str(figure.parent)], check=True, cwd=ROOT)

    return draw


def draw_sweep(name: str, figure: Path, results: Path) -> None:
    """Draw the accuracy of every setting of a sweep with committed results."""
    sweep = load_sweep(SWEEPS / f"{name}.yaml")
    draw_summary(summarize(sweep, results), sweep.metric, figure)


def draw_table(table: Path, metric: str, figure: Path, results: Path) -> None:
    """Draw the accuracy of every setting of a sweep whose table alone is committed."""
    draw_summary(pd.read_csv(table), metric, figure)


def draw_lengths(figure: Path, results: Path) -> None:
    """Draw the accuracy on CIFAR-10 over weight decay, learning rate and length."""
    tables = []
    for name in ("cifar10", "cifar10-steps"):
        tables.append(str(results / f"{name}.csv"))
        summarize(load_sweep(SWEEPS / f"{name}.yaml"), results).to_csv(tables[-1], index=False)
    run("vision.robustness", *tables, "--task", "cifar10")(figure, results)


def draw_report_figure(study: str, figure: Path, results: Path) -> None:
    """Draw the differences of a study's report."""
    definition = load(str(STUDIES / f"{study}.yaml"))
    (part,) = read_results(definition, results).by_condition()
    judged = judge(compare_with([choose_compared(part)], definition.reference))
    figure.write_bytes(draw_differences(judged, part.title, ("png",)).files["png"])


def draw_effect(figure: Path, results: Path) -> None:
    """Draw what CPR changes in each study, from their reports."""
    for study in COMPARED:
        report = results / "studies" / study / "report"
        definition = load(str(STUDIES / f"{study}.yaml"))
        write_report(definition, results, None, None, report, Console(file=io.StringIO()))
    run("real_data.differences", studies=COMPARED)(figure, results)


def draw_history(fold: str, figure: Path, results: Path) -> None:
    """Draw ``cpr_progress.png`` of a committed run."""
    draw_progress(History.read(results / fold))
    shutil.copyfile(results / fold / FIGURE_NAME, figure)


def draw_report(study: Path, width: int, height: int, figure: Path, results: Path) -> None:
    """Draw the first screen of a study's report, down to the end of its first section."""
    if BROWSER is None:
        raise SystemExit("pictures of reports need Chromium; install it, as chromium or google-chrome")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_report(load(str(study)), results, None, None, folder, Console(file=io.StringIO()))
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--force-device-scale-factor=1", f"--window-size={width},{height}"]
        command += [f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'page.png'}"]
        subprocess.run([*command, (folder / "report.html").as_uri()], check=True, capture_output=True)
        with Image.open(folder / "page.png") as page:
            picture = page.convert("RGB")
    blank = Image.new("RGB", picture.size, "white")
    _, _, right, bottom = ImageChops.difference(picture, blank).getbbox() or (0, 0, *picture.size)
    cropped = picture.crop((0, 0, min(width, right + 20), min(height, bottom + 20)))
    cropped.quantize(256).save(figure, optimize=True)


def draw_published(figure: Path, results: Path) -> None:
    """Draw the report on the published results of ten data sets."""
    given = os.environ.get("nnUNet_results")
    if not given:
        raise SystemExit("nnUNet_results: expected the folder of the published results, got none")
    draw_report(ROOT / "benchmarks" / "published" / "decathlon.yaml", 900, 650, figure, Path(given))


COMPARED = (
    *("default_sgd", "best_sgd", "default_adam", "best_adam", "default_muon", "best_muon"),
    *("few_cases_10", "few_cases_20", "few_cases_40"),
    *("acdc_sgd", "acdc_best_sgd", "acdc_adam", "acdc_muon"),
)
"""Studies with the answers of the results page."""
TRAINER = "nnUNetTrainerAdamCPR_ws100_lr3en3_warmup50_10epochs_25iters_seed1"
FOLD = f"Dataset004_Hippocampus/{TRAINER}__nnUNetPlansSmall__3d_fullres/fold_0"

FIGURES: dict[str, Draw] = {
    "cpr": draw_effect,
    "decathlon_report": draw_published,
    "hippocampus_progress": partial(draw_history, FOLD),
    "methods": partial(draw_report_figure, "methods"),
    **{f"plain-pytorch-{n}": script("scripts/tutorials.py", "--figures") for n in (1, 2)},
    **{
        f"progress-{kind}": script("figures/progress_figures.py")
        for kind in ("good", "never-set", "too-loose", "too-tight")
    },
    "rates_and_lengths": run("real_data.rates_and_lengths", studies=("rates_sgd", "long_sgd")),
    "rates_and_lengths_acdc": run(
        "real_data.rates_and_lengths", "--deepest", "14", studies=("acdc_rates_sgd", "acdc_lengths_sgd")
    ),
    "robustness": run("real_data.robustness", studies=("tuned_sgd", "tuned_adam", "tuned_muon")),
    "robustness_acdc": run("real_data.robustness", studies=("acdc_tuned_sgd",)),
    "sensitivity": run("real_data.robustness", studies=("tuned_sgd",)),
    "steps_to_dice": run("real_data.steps_to_dice", studies=("lengths",)),
    "study_result": partial(draw_report, STUDIES / "hippocampus_seeds.yaml", 850, 900),
    "vision-cifar10": partial(draw_sweep, "cifar10"),
    "vision-cifar10-robustness": draw_lengths,
    "vision-grokking": partial(
        draw_table, ROOT / "docs" / "figures" / "data" / "vision-grokking.csv", "accuracy"
    ),
    "vision-text": partial(draw_sweep, "text"),
}
"""Drawing of each figure by its name without suffix."""
TRAINED = [name for name in FIGURES if name.startswith(("plain-pytorch", "progress-"))]
"""Figures that are drawn after trainings of minutes."""
SIMPLE = [name for name in FIGURES if name not in (*TRAINED, "decathlon_report")]
"""Figures that follow from what comes with the source."""


def main() -> None:
    """Draw the figures that are named, by default those that follow from the source."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures", help="folder to write")
    given = parser.parse_args()
    if unknown := sorted({*given.names} - {*FIGURES}):
        parser.error(f"unknown figures {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        figures = {name: given.output / f"{name}.png" for name in given.names or SIMPLE}
        for name in [name for name in figures if name in TRAINED]:
            figures[name].unlink(missing_ok=True)
        for name, figure in figures.items():
            FIGURES[name](figure, Path(folder))
            print(figure)


if __name__ == "__main__":
    main()
