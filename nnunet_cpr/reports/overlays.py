"""Pictures of cases: slices of the image with ground truth and predictions."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from PIL import Image

from nnunet_cpr._files import read_json
from nnunet_cpr.reports.case_files import existing, truth_file
from nnunet_cpr.reports.comparisons import Comparison
from nnunet_cpr.reports.figures import Drawing, draw
from nnunet_cpr.reports.results import UNSEEDED, Results, class_key, read_dataset_json
from nnunet_cpr.reports.volumes import SOFT_TISSUE, View, read_views, soft_tissue_window

CLASS_COLOURS = (
    *("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2"),
    *("#aa4499", "#999933", "#ee99aa"),
)
"""Okabe and Ito's colours for colour-blind readers without black, then three of Paul Tol's."""
TRUTH = "#ffffff"
_FILL = 0.3
_SIDE = 2.4
"""Inches of a picture's longer side."""
_DPI = 180
_LEGEND_COLUMNS = 4


@dataclass(frozen=True)
class Panel:
    """Picture as a data URI."""

    title: str
    source: str
    alt: str


@dataclass(frozen=True)
class Overlay:
    """Pictures of one case: for each view the ground truth, the reference, and the other trainer.

    Attributes:
        rank: such as "largest difference".
        caption: case, fold, difference and slices.
        rows: the pictures of each view.
        classes: (name, colour) of the classes in the pictures.
        drawing: all pictures of the case in one figure.
    """

    rank: str
    case: str
    fold: int
    caption: str
    rows: tuple[tuple[Panel, ...], ...]
    classes: tuple[tuple[str, str], ...]
    drawing: Drawing


@dataclass(frozen=True)
class Classes:
    """Names and colours of the labels of a data set.

    Attributes:
        names: name of each label in the order of ``dataset.json``.
        ignored: nnU-Net's ignore label, if there is one.
    """

    names: Mapping[int, str]
    ignored: int | None = None

    def name(self, label: int) -> str:
        """Return the name of a label."""
        return self.names.get(label, f"label {label}")

    def colour(self, label: int) -> str:
        """Return the colour of a label, the same in all pictures of the data set."""
        known = list(self.names)
        position = known.index(label) if label in known else len(known) + label
        return CLASS_COLOURS[position % len(CLASS_COLOURS)]


def read_classes(labels: Any) -> Classes:
    """Return the classes of the ``labels`` of a ``dataset.json``.

    A label of several regions has the name of the smallest: of "whole tumor" (1, 2) and "core" (2),
    label 1 is "whole tumor (rest)".

    Example:
        >>> dict(read_classes({"background": 0, "whole": [1, 2], "core": 2}).names)
        {1: 'whole (rest)', 2: 'core'}
    """
    regions = (
        {name: class_key(value) for name, value in labels.items()} if isinstance(labels, dict) else {}
    )
    ignored = regions.pop("ignore", ())
    smallest: dict[int, str] = {}
    for name, key in sorted(regions.items(), key=lambda item: len(item[1])):
        for label in key:
            if label:
                smallest.setdefault(label, name)
    names = {}
    for label in sorted(smallest, key=lambda each: (list(regions).index(smallest[each]), each)):
        name = smallest[label]
        of_region = [each for each in regions[name] if smallest.get(each) == name]
        if len(of_region) > 1:
            name += f" (label {label})"
        elif len(regions[name]) > 1:
            name += " (rest)"
        names[label] = name
    return Classes(names, ignored[0] if ignored else None)


def case_pairs(results: Results, comparison: Comparison) -> pd.DataFrame:
    """Return the mean foreground Dice in percent of the cases that the first seed of both has.

    Returns:
        Columns reference and other, indexed by (fold, case).
    """
    pairs = pd.DataFrame(columns=["reference", "other"], dtype=float)
    if not comparison.seeds:
        return pairs
    cases = results.of(results.cases, comparison.setting)
    cases = cases[cases["seed"] == comparison.seeds[0]]
    dice = 100 * cases.groupby(["trainer", "fold", "case"], sort=False)["dice"].mean()
    parts = {
        name: pd.concat([dice.loc[[trainer], [fold]] for fold, trainer in trained.items()])
        for name, trained in zip(pairs.columns, comparison.trained)
    }
    both = pd.concat({name: part.droplevel("trainer") for name, part in parts.items()}, axis=1)
    return both.dropna().sort_index()


def extreme_cases(pairs: pd.DataFrame) -> list[tuple[str, int, str]]:
    """Return the cases with the largest, median and smallest difference other - reference.

    Args:
        pairs: the cases of :func:`case_pairs`.

    Returns:
        (rank, fold, case); fewer than three if there are fewer cases.
    """
    differences = pairs["other"] - pairs["reference"]
    ranked = list(differences.sort_values(ascending=False, kind="stable").index)
    picks = {len(ranked) - 1: "smallest"}
    picks[0] = "largest"
    picks.setdefault(len(ranked) // 2, "median")
    return [(f"{picks[i]} difference", *ranked[i]) for i in sorted(picks) if 0 <= i < len(ranked)]


def overlays(
    results: Results, comparison: Comparison, raw: Path | None, preprocessed: Path | None
) -> tuple[list[Overlay], list[str]]:
    """Return the pictures of :func:`extreme_cases`, and a note for each case without one."""
    pictures, notes = [], []
    pairs = case_pairs(results, comparison)
    for rank, fold, case in extreme_cases(pairs):
        dice = (float(pairs.loc[(fold, case), "reference"]), float(pairs.loc[(fold, case), "other"]))
        try:
            files = _find_files(results, comparison, raw, preprocessed, fold, case)
            pictures.append(_overlay(comparison, files, rank, fold, case, dice))
        except (FileNotFoundError, ValueError) as error:
            notes.append(f"No picture of {case}: {error}.")
        except (OSError, RuntimeError):  # SimpleITK raises RuntimeError
            notes.append(f"No picture of {case}: a file cannot be read.")
    return pictures, notes


@dataclass(frozen=True)
class _Files:
    """Files of one case.

    Attributes:
        image: the first channel.
        labels: ground truth, prediction of the reference, prediction of the other.
        dataset: content of ``dataset.json``.
        is_ct: True if the first channel is CT.
    """

    image: Path
    labels: list[Path]
    dataset: dict[str, Any]
    is_ct: bool


def _find_files(
    results: Results,
    comparison: Comparison,
    raw: Path | None,
    preprocessed: Path | None,
    fold: int,
    case: str,
) -> _Files:
    setting = comparison.setting
    if raw is None:
        raise FileNotFoundError("nnUNet_raw is not set")
    folders = [
        results.run(setting, fold, trained[fold], comparison.seeds[0]).folder(results.folder)
        for trained in comparison.trained
    ]
    dataset = read_dataset_json(folders[0], setting.dataset, preprocessed, raw)
    ending = str(dataset.get("file_ending", ".nii.gz"))
    image = existing(raw / setting.dataset / "imagesTr" / f"{case}_0000{ending}", "image")
    labels = [truth_file(f"{case}{ending}", setting.dataset, raw, preprocessed)]
    for folder, title in zip(folders, ("the reference", "the other trainer")):
        labels.append(existing(folder / "validation" / f"{case}{ending}", f"prediction of {title}"))
    plans = folders[0].parent / "plans.json"
    return _Files(image, labels, dataset, is_ct(plans, setting.configuration, dataset))


def is_ct(plans: Path, configuration: str, dataset: Mapping[str, Any]) -> bool:
    """Return True if the first channel is CT, by the plans or else by the channel's name.

    Args:
        plans: ``plans.json`` of the training.
        configuration: nnU-Net's name, such as ``3d_fullres``.
        dataset: content of ``dataset.json``.
    """
    try:
        content = read_json(plans)["configurations"]
        for _ in range(len(content)):
            here = content[configuration]
            if "normalization_schemes" in here:
                return bool(here["normalization_schemes"][0] == "CTNormalization")
            configuration = here["inherits_from"]
    except (OSError, ValueError, LookupError, TypeError):
        pass  # no plans, or none of nnU-Net's: the channel's name decides
    channels = dataset.get("channel_names") or dataset.get("modality")
    return isinstance(channels, dict) and str(channels.get("0", "")).casefold() == "ct"


def _overlay(
    comparison: Comparison, files: _Files, rank: str, fold: int, case: str, dice: tuple[float, float]
) -> Overlay:
    classes = read_classes(files.dataset.get("labels"))
    views, window = read_views(files.image, files.labels, classes.ignored)
    if files.is_ct:
        window = soft_tissue_window()
    names = [comparison.reference.full_title, comparison.entry.full_title]
    titles = ["ground truth", *(f"{name}: {value:.2f}" for name, value in zip(names, dice))]
    key = "-".join([*comparison.setting, comparison.entry.trainer])
    present = {int(x) for view in views for plane in view.labels for x in np.unique(plane) if x}
    shown = [label for label in classes.names if label in present]
    shown += sorted(present.difference(shown))
    name = f"case-{rank.split()[0]}-{key}"
    pictures, drawing = draw_case(views, titles, classes, shown, window, name)
    rows = []
    for view, sources in zip(views, pictures):
        plane_name = "Slice" if view.plane == "slice" else f"{view.plane.capitalize()} slice"
        where = f"{plane_name} {view.position} of {view.slices} of {case}"
        truth, *predictions = view.labels
        alts = [f"{where} with the ground truth: {np.count_nonzero(truth)} foreground pixels."]
        alts += [
            f"{where} with the prediction of {trainer}, Dice of the case {value:.2f} percent: "
            f"{np.count_nonzero(plane)} foreground pixels, {np.count_nonzero(plane != truth)} pixels "
            "differ from the truth."
            for trainer, value, plane in zip(names, dice, predictions)
        ]
        prefix = "" if view.plane == "slice" else f"{view.plane}, "
        rows.append(
            tuple(Panel(prefix + t, source, alt) for t, source, alt in zip(titles, sources, alts))
        )
    places = ", ".join(f"{view.plane} {view.position} of {view.slices}" for view in views)
    caption = f"{case}, fold {fold}, {dice[1] - dice[0]:+.2f} points; {places}"
    if (seed := comparison.seeds[0]) != UNSEEDED:
        caption += f"; trainings with seed {seed}"
    if files.is_ct:
        caption += "; CT, level {:g} HU, width {:g} HU".format(*SOFT_TISSUE)
    return Overlay(
        rank,
        case,
        fold,
        caption,
        tuple(rows),
        tuple((classes.name(label), classes.colour(label)) for label in shown),
        drawing,
    )


def draw_case(
    views: Sequence[View],
    titles: Sequence[str],
    classes: Classes,
    shown: Sequence[int],
    window: tuple[float, float],
    name: str,
) -> tuple[list[list[str]], Drawing]:
    """Draw all views of a case: a row for each view, a column for each label map.

    Args:
        views: the views.
        titles: titles of the columns.
        classes: names and colours of the labels.
        shown: labels of the legend.
        window: grey values of black and white.
        name: name of the figure's files.

    Returns:
        Each picture as a data URI, [views][columns], and the whole figure.
    """
    sizes = [_inches(view) for view in views]
    gap, top = 0.12, 0.5
    rows_of_legend = -(-(len(shown) + 1) // _LEGEND_COLUMNS)
    bottom = 0.15 + 0.2 * rows_of_legend
    width = len(titles) * (_SIDE + gap) + gap
    height = top + sum(h + gap for _, h in sizes) + bottom
    with draw(name, (width, height), dpi=_DPI, inline=False) as (figure, drawing):
        figure.set_layout_engine("none")
        y = height - top
        pictures = []
        for view, (w, h) in zip(views, sizes):
            y -= h
            row = []
            for column in range(len(titles)):
                x = gap + column * (_SIDE + gap) + (_SIDE - w) / 2
                ax = figure.add_axes((x / width, y / height, w / width, h / height))
                _draw_view(ax, view, column, classes, window)
                row.append(ax)
            pictures.append(row)
            y -= gap
        sources = _crop_pictures(figure, pictures)
        for column, title in enumerate(titles):
            x = gap + column * (_SIDE + gap) + _SIDE / 2
            text = "\n".join(textwrap.wrap(title, 32, max_lines=2, placeholder="…"))
            figure.text(
                x / width, 1 - top / height + 0.06 / height, text.replace("$", r"\$"),
                ha="center", va="bottom", fontsize=9,
            )  # fmt: skip
        handles: list[Any] = [
            Patch(facecolor=classes.colour(each), label=classes.name(each).replace("$", r"\$"))
            for each in shown
        ]
        truth = Line2D([], [], color=TRUTH, linestyle=":", linewidth=1.6, label="dotted: ground truth")
        truth.set_path_effects([withStroke(linewidth=3, foreground="black")])
        figure.legend(
            handles=[*handles, truth],
            loc="lower center",
            ncols=_LEGEND_COLUMNS,
            frameon=False,
            fontsize=8,
        )
    return sources, drawing


def _inches(view: View) -> tuple[float, float]:
    """Return width and height of a view's picture; the longer side is the same in all."""
    height, width = view.image.shape[0] * view.aspect, float(view.image.shape[1])
    scale = _SIDE / max(height, width)
    # A strip of a few pixels would have no room for the letters.
    return max(width * scale, 0.3), max(height * scale, 0.3)


def _draw_view(ax: Any, view: View, column: int, classes: Classes, window: tuple[float, float]) -> None:
    low, high = window
    ax.set_axis_off()
    ax.imshow(view.image, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), aspect="auto")
    plane, truth = view.labels[column], view.labels[0]
    for label in np.unique(plane[plane > 0]):
        y, x, mask = _closed(plane == label)
        colour = classes.colour(int(label))
        ax.contourf(x, y, mask, levels=[0.5, 1.5], colors=colour, alpha=_FILL)
        if column:
            ax.contour(x, y, mask, levels=[0.5], colors=colour, linewidths=1.4)
    for label in np.unique(truth[truth > 0]):
        y, x, mask = _closed(truth == label)
        ax.contour(x, y, mask, levels=[0.5], colors=TRUTH, linewidths=1.0, linestyles="dotted")
    ax.set(xlim=(-0.5, view.image.shape[1] - 0.5), ylim=(view.image.shape[0] - 0.5, -0.5))
    places = [
        *((0.02, 0.5, "left", "center"), (0.98, 0.5, "right", "center")),
        *((0.5, 0.98, "center", "top"), (0.5, 0.02, "center", "bottom")),
    ]
    for letter, (x_at, y_at, ha, va) in zip(view.edges, places):
        text = ax.text(
            x_at, y_at, letter, transform=ax.transAxes, ha=ha, va=va, color="white", fontsize=9
        )
        text.set_path_effects([withStroke(linewidth=1.8, foreground="black")])


def _closed(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, columns and a mask with a border, so that contours at the edge are closed."""
    padded = np.pad(mask, 1).astype(np.uint8)
    return np.arange(padded.shape[0]) - 1, np.arange(padded.shape[1]) - 1, padded


def _crop_pictures(figure: Figure, axes: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return each picture of a figure as a data URI."""
    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]

    def source(ax: Any) -> str:
        box = ax.get_window_extent()
        top, bottom = len(pixels) - round(box.y1), len(pixels) - round(box.y0)
        part = pixels[top:bottom, round(box.x0) : round(box.x1)]
        webp = io.BytesIO()
        Image.fromarray(part).save(webp, "webp", quality=80)
        return "data:image/webp;base64," + base64.b64encode(webp.getvalue()).decode()

    return [[source(ax) for ax in row] for row in axes]
