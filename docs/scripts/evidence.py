"""Write the pages of the tab Evidence: ``python docs/scripts/evidence.py``.

Each archive in ``benchmarks/real_data/results`` is unpacked, and the report of its study is written to
the page of its data set. A page on images and text has the sweeps of ``benchmarks/vision``. With
``--check`` the committed pages are compared with what would be written, and the exit status is 1 if one
is out of date; the last printed digit of a number may differ, as libraries round differently.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import io
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent, wrap

import numpy as np
import pandas as pd
import yaml
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.real_data import archive, rates_and_lengths, robustness, steps_to_dice
from benchmarks.real_data.trainings import read_trainings
from benchmarks.vision.compare import COMPARISONS, compare_methods
from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.page import CAVEAT, METHODS
from nnunet_cpr.reports.tables import escape_markdown
from nnunet_cpr.studies.study_file import load
from nnunet_cpr.vision.sweep import load_sweep, read_results, summarize

EVIDENCE = ROOT / "docs" / "evidence"
REAL = ROOT / "benchmarks" / "real_data"
VISION = ROOT / "benchmarks" / "vision"

PAGES = {
    "hippocampus": (
        "Hippocampus",
        "Task 04 of the Medical Segmentation Decathlon: 260 T1 MRI, two structures. nnU-Net's "
        "`3d_fullres` with 8 to 64 features and batch size 2. The patch is 32 x 40 x 32 "
        "(`nnUNetPlansSmallPatch`) or 40 x 56 x 40 (`nnUNetPlansSmall`).",
    ),
    "acdc": (
        "ACDC",
        "200 cardiac MRI, two frames of each of 100 patients, three structures. nnU-Net's `2d` with "
        "small features, a patch of 192 x 160 and batch size 4. The source has no spacings, so all "
        "volumes were given 1.5 x 1.5 x 10 mm and the Dice cannot be compared with published ones.",
    ),
}
"""Title and description of the page of each data set."""
FIGURES = {
    "methods": ("methods.png", "differences of 17 methods from SGD with weight decay"),
    "hippocampus_seeds": ("study_result.png", "answer, main table and differences of the report"),
    "cifar10": ("vision-cifar10.png", "accuracy of every setting"),
    "text": ("vision-text.png", "accuracy of every setting"),
}
"""Committed figure of a study or sweep, with its alternative text."""
READING = (
    "Built from the results that come with the source by `python docs/scripts/evidence.py`; "
    "[Results](../reference/results.md) has the answers, and how to repeat the training runs. "
    "Notes, tables by class and times are behind *Details*."
)


def build_pages() -> dict[Path, str]:
    """Return the content of all pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive.unpack(sorted((REAL / "results").glob("*.tar.xz")), folder)
        texts = {page: "\n\n".join(data_set_page(page, folder)) for page in PAGES}
        for file in (VISION / "results").glob("*.tar.xz"):
            with tarfile.open(file) as results:
                results.extractall(folder / "vision", filter="data")
        texts["images-and-text"] = "\n\n".join(vision_page(folder / "vision"))
    return {EVIDENCE / f"{page}.md": text + "\n" for page, text in texts.items()}


def is_same(one: str, other: str) -> bool:
    """Return True for equal texts but for the last digits of decimal numbers."""
    pieces, others = (re.split(r"([0-9]+\.[0-9]+)", text) for text in (one, other))
    return len(pieces) == len(others) and all(
        a == b or (place % 2 == 1 and len(a) == len(b) and abs(float(a) - float(b)) < 1.5 * _unit(a))
        for place, (a, b) in enumerate(zip(pieces, others))
    )


def _unit(number: str) -> float:
    """Return the value of the last digit of a decimal number."""
    return 10.0 ** -len(number.partition(".")[2])


def _start(title: str, text: str) -> Iterator[str]:
    yield f"---\nsearch:\n  exclude: true\n---\n\n# {title}"
    yield text
    yield READING


def data_set_page(page: str, results: Path) -> Iterator[str]:
    """Yield the paragraphs of a page with the studies of a data set."""
    yield from _start(*PAGES[page])
    yield from (escape_markdown(CAVEAT), escape_markdown(METHODS))
    for file in sorted((REAL / "results").glob("*.tar.xz")):
        study = file.name.removesuffix(".tar.xz")
        if page_of(study) == page:
            yield study_section(study, results)
    yield from _together(page, results)


def page_of(study: str) -> str:
    """Return the page of a study, by its data set."""
    (dataset,) = load(_study_file(study)).datasets
    return dataset.partition("_")[2].lower()


def _study_file(study: str) -> str:
    return str(REAL / "studies" / f"{study}.yaml")


def study_section(study: str, results: Path) -> str:
    """Return the section of a study: its report, the details folded.

    Args:
        study: name of the study.
        results: folder with the unpacked results of the study.
    """
    output = results / "reports" / study
    file = _study_file(study)
    path = Path(file).relative_to(ROOT)
    write_report(load(file), results, None, None, output, Console(file=io.StringIO()))
    report = (output / "report.md").read_text()
    for same_in_all in (CAVEAT, METHODS):
        report = report.replace(escape_markdown(same_in_all) + "\n\n", "")
    _, _, answer, *details = re.split(r"^#+ (?=.)", report, flags=re.MULTILINE)
    parts = [
        f"## {study} {{#{study}}}",
        _comment(file),
        _command(f"nnUNet_results=results nnunet-cpr study report {path}"),
        *_figure(study),
        answer.partition("\n\n")[2].strip(),
        _folded("\n\n".join(map(_without_heading, details))),
    ]
    return "\n\n".join(parts)


def _comment(file: str | Path) -> str:
    """Return the comment at the top of a study or sweep file, without its commands."""
    lines = []
    for line in Path(file).read_text().splitlines():
        if not line.startswith("# "):
            break
        if not line.startswith("# nnunet-cpr "):
            lines.append(line.removeprefix("# "))
    return escape_markdown(" ".join(lines))


def _command(*commands: str) -> str:
    """Return a block of commands whose lines fit on the page."""
    lines = (
        wrap(each, 78, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for each in commands
    )
    return "```bash\n" + "\n".join(map(" \\\n".join, lines)) + "\n```"


def _figure(name: str) -> Iterator[str]:
    if name in FIGURES:
        file, text = FIGURES[name]
        yield f"![{text}](../figures/{file})"


def _without_heading(section: str) -> str:
    """Return a section of a report with its heading as a bold line."""
    title, _, text = section.partition("\n\n")
    return f"**{title.partition(':')[0]}**\n\n{text.strip()}"


def _folded(text: str) -> str:
    return '??? note "Details"\n\n' + indent(text, "    ")


def table(frame: pd.DataFrame, digits: int = 2) -> str:
    """Return a table in Markdown with its columns as headings."""
    names = [escape_markdown(str(name)) for name in frame.columns]
    rows = [[_cell(value, digits) for value in row] for row in frame.itertuples(index=False, name=None)]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object, digits: int) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value:,.{digits}f}"
    return escape_markdown(str(value))


# Tables over several studies


def _together(page: str, results: Path) -> Iterator[str]:
    """Yield the tables and figures that read more than one study, or one in another way."""
    if page == "hippocampus":
        yield from _robustness(["tuned_sgd", "tuned_adam", "tuned_muon"], results, "robustness.png")
        yield from _rates(["rates_sgd", "long_sgd"], results, "rates_and_lengths.png")
        yield from _steps("lengths", results)
    if page == "acdc":
        yield from _robustness(["acdc_tuned_sgd"], results, "robustness_acdc.png")
        names, figure = ["acdc_rates_sgd", "acdc_lengths_sgd"], "rates_and_lengths_acdc.png"
        yield from _rates(names, results, figure, "--deepest 14 ")


def _script(module: str, studies: list[str], figure: str, option: str = "") -> str:
    """Return the command that prints a table and draws its figure."""
    files = " ".join(f"benchmarks/real_data/studies/{study}.yaml" for study in studies)
    run = f"nnUNet_results=results python -m benchmarks.real_data.{module}"
    return _command(f"{run} {files} {option}--figure docs/figures/{figure}")


def _robustness(studies: list[str], results: Path, figure: str) -> Iterator[str]:
    yield "## Every weight decay and warm start {#every-weight-decay-and-warm-start}"
    yield (
        "Mean Dice in percent over the folds, one seed. Best and worst were found on the cases that "
        "they are reported on. The default is nnU-Net's weight decay of 3e-5, or CPR's own warm start."
    )
    yield f"![Dice over weight decay, and over the warm start of CPR](../figures/{figure})"
    files = [_study_file(study) for study in studies]
    frames = [read_trainings(file, results, robustness.describe) for file in files]
    trainings = pd.concat(frames)
    keys = ["optimizer", "kind", "setting"]
    settings = trainings.groupby(keys, sort=False)["dice"].mean().reset_index()
    settings["setting"] = settings["setting"].map("{:g}".format)
    ends = robustness.tabulate(trainings)
    for column in ("best setting", "worst setting"):
        ends[column] = ends[column].map("{:g}".format)
    yield table(ends)
    yield _folded(table(settings))
    yield _script("robustness", studies, figure)


def _rates(studies: list[str], results: Path, figure: str, option: str = "") -> Iterator[str]:
    yield "## Learning rates and lengths {#learning-rates-and-lengths}"
    yield "Mean Dice in percent over the folds, one seed, for each weight decay and for CPR's default."
    yield f"![Dice over weight decay for three learning rates and two lengths](../figures/{figure})"
    frames = [rates_and_lengths.read(_study_file(study), results) for study in studies]
    whole = pd.concat(frames).drop(columns="std").drop_duplicates()
    keys = list(rates_and_lengths.COLUMNS[:3])
    whole["decay"] = ["CPR" if np.isnan(decay) else f"{decay:g}" for decay in whole["decay"]]
    order = [*sorted(set(whole["decay"]) - {"CPR"}, key=float), "CPR"]
    wide = whole.pivot(index=keys, columns="decay", values="mean")[order].reset_index()
    wide[keys] = wide[keys].map(lambda value: f"{value:g}" if isinstance(value, float) else value)
    yield table(wide)
    yield _script("rates_and_lengths", studies, figure, option)


def _steps(study: str, results: Path) -> Iterator[str]:
    yield "## Steps to a Dice {#steps-to-a-dice}"
    yield (
        "Dice in percent, mean ± standard deviation over three seeds on fold 0, and the steps for the "
        "Dice that nnU-Net's SGD has at each length (goal), interpolated on a logarithmic scale: "
        "from the means, and from the best (fewest) and the worst (most) of the runs at each length."
    )
    yield "![Dice of each training run over its number of steps](../figures/steps_to_dice.png)"
    file = _study_file(study)
    trainings = read_trainings(file, results, steps_to_dice.describe)
    dice = trainings.groupby(["optimizer", "steps"], sort=False)["dice"].agg(["mean", "std"])
    means, deviations = (dice[name].map("{:.2f}".format) for name in ("mean", "std"))
    cells = (means + " ± " + deviations).unstack("steps")
    yield table(cells[sorted(cells)].rename(columns="{:,} steps".format).reset_index())
    definition = load(file)
    reference = definition.entry(definition.reference).title.partition(",")[0]
    needed = steps_to_dice.tabulate(trainings, reference)
    is_shortest = needed["goal"] == needed["goal"].min()  # which every optimizer reaches at once
    yield table(needed[~is_shortest & (needed["optimizer"] != reference)], digits=0)
    yield _script("steps_to_dice", [study], "steps_to_dice.png")


# Images and text


def vision_page(results: Path) -> Iterator[str]:
    """Yield the paragraphs of the page with the sweeps whose results are committed."""
    yield from _start(
        "Images and text",
        "A small ResNet on 2,000 images of CIFAR-10 at 16 x 16 pixels, and a causal transformer of 0.4 "
        "million parameters that predicts the next byte of Shakespeare's plays. Accuracy in percent. Of "
        "each method the setting with the best mean validation accuracy is compared on test data: "
        "difference, Welch's 95 % interval, and p with Bonferroni's correction for the "
        "comparisons of the sweep.",
    )
    for name, references in yaml.safe_load(COMPARISONS.read_text()).items():
        sweep = load_sweep(VISION / f"{name}.yaml")
        compared = compare_methods(read_results(sweep, results), references)
        for column in ("selection", "mean", "std", "difference", "low", "high"):
            compared[column] = compared[column].round(2)
        compared["p"] = [f"{p:.3f}" if p >= 0.001 else "< 0.001" if p < 1 else "" for p in compared["p"]]
        yield f"## {name} {{#{name}}}"
        yield _comment(VISION / f"{name}.yaml")
        yield _command(
            f"nnunet-cpr vision sweep benchmarks/vision/{name}.yaml",
            f"python -m benchmarks.vision.compare benchmarks/vision/{name}.yaml",
        )
        yield from _figure(name)
        yield table(compared)
        yield _folded("Every setting:\n\n" + table(summarize(sweep, results)))
    yield "## Learning rates and lengths of CIFAR-10 {#learning-rates-and-lengths}"
    yield (
        "![Accuracy over weight decay for three learning rates and three lengths]"
        "(../figures/vision-cifar10-robustness.png)"
    )
    files = "vision-results/cifar10.csv vision-results/cifar10-steps.csv"
    yield _command(
        f"python -m benchmarks.vision.robustness {files} --task cifar10 "
        "--figure docs/figures/vision-cifar10-robustness.png",
    )


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="Write the pages of the tab Evidence.")
    parser.add_argument("--check", action="store_true", help="Check the committed pages instead.")
    check, pages = parser.parse_args().check, build_pages()
    EVIDENCE.mkdir(exist_ok=True)
    before = {path: path.read_text() if path.exists() else "" for path in pages}
    old = [path for path, text in pages.items() if not is_same(before[path], text)]
    for path in old:
        name = path.relative_to(ROOT)
        print(f"{name} is out of date; run this script" if check else f"wrote {name}")
        if not check:
            path.write_text(pages[path])
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    main()
