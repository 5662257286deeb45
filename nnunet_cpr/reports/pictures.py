"""Pictures of cases: a slice of the image with ground truth and two predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import SimpleITK as sitk
from matplotlib.patches import Patch

from nnunet_cpr.figures import styled_figure
from nnunet_cpr.reports.comparison import Comparison
from nnunet_cpr.reports.figures import MAX_DRAWN, STYLE, Picture, save, short
from nnunet_cpr.reports.metrics import value_text
from nnunet_cpr.reports.reading import class_key, counted_voxels, ignore_label, read_dataset_json
from nnunet_cpr.reports.results import FAILED, UNSEEDED
from nnunet_cpr.reports.selection import Compared

_MARGIN = 10
"""Voxels around the structures."""
_CT_WINDOW = (-160.0, 240.0)
"""Hounsfield units of black and white, for soft tissue."""


class _Case(NamedTuple):
    """A case to draw: its title, the name of its picture, its place, and the two trainers."""

    title: str
    name: str
    fold: int
    case: str
    comparison: Comparison


def draw_cases(
    compared: Compared, comparisons: Sequence[Comparison], raw: Path
) -> tuple[list[Picture], list[str]]:
    """Draw the worst case of each trainer, and those of smallest, median and largest gain of the best.

    Cases that failed come first. All are of the runs of the first seed.

    Args:
        compared: the trainers of a condition.
        comparisons: those of the condition with the reference, by one metric.
        raw: nnU-Net's ``nnUNet_raw``.

    Returns:
        The pictures, and a note for all cases without one.
    """
    pictures, missing = [], {}
    for each in _choose(compared.results.cases, comparisons):
        try:
            dataset, files = _find_files(compared, each.comparison, raw, each.fold, each.case)
            name = "-".join([each.name, *each.comparison.condition])
            pictures.append(draw_case(files, dataset, each.title, name))
        except (OSError, ValueError, RuntimeError) as error:  # SimpleITK raises RuntimeError
            missing[each.case] = " ".join(str(error).rpartition("ERROR: ")[2].split())
    if not missing:
        return pictures, []
    case, reason = next(iter(missing.items()))
    return pictures, [f"No picture of {', '.join(missing)}. {case}: {reason}"]


def _choose(cases: pd.DataFrame, comparisons: Sequence[Comparison]) -> list[_Case]:
    """Return the cases to draw, each with the same two trainers once."""
    best = max(comparisons, key=lambda each: each.gain)
    dice = _dice(cases, best)
    gains = (dice[best.entry.key] - dice[best.reference.key]).dropna().sort_values(kind="stable")
    kinds = {len(gains) // 2: "median", 0: "worst", len(gains) - 1: "best"} if len(gains) else {}
    chosen = []
    for position, kind in sorted(kinds.items()):
        fold, case = gains.index[position]
        gain = value_text(gains.iloc[position], "+.2f")
        title = f"{kind} case, {_place(case, fold, best)}: {gain} points of Dice"
        chosen.append(_Case(title, kind, fold, case, best))
    failed: list[_Case] = []
    lowest: list[_Case] = []
    entries = [(best.reference, best), *((each.entry, each) for each in comparisons[:MAX_DRAWN])]
    for number, (entry, comparison) in enumerate(entries):
        dice = _dice(cases, comparison)[entry.key].dropna()
        if dice.empty:
            continue
        (fold, case), value = dice.idxmin(), float(dice.min())
        is_failed = value < 100 * FAILED
        kind = "failed case" if is_failed else "lowest Dice"
        title = f"{kind} of {entry.full_title}, {_place(case, fold, comparison)}: {value:.2f} %"
        (failed if is_failed else lowest).append(
            _Case(title, f"lowest-{number}", fold, case, comparison)
        )
    unique: dict[tuple[int, str, str], _Case] = {}
    for each in (*failed, *chosen, *lowest):
        unique.setdefault((each.fold, each.case, each.comparison.entry.key), each)
    return list(unique.values())


def _dice(cases: pd.DataFrame, c: Comparison) -> pd.DataFrame:
    """Return the Dice of the first seed in percent: rows (fold, case), a column for each trainer."""
    of_seed = cases[(cases["seed"] == c.seeds[0]) & cases["fold"].isin(c.folds)]
    dice = 100 * of_seed.groupby(["trainer", "fold", "case"])["dice"].mean()
    return dice.unstack("trainer").reindex(columns=[c.entry.key, c.reference.key])


def _place(case: str, fold: int, c: Comparison) -> str:
    seed = "" if c.seeds[0] == UNSEEDED else f", seed {c.seeds[0]}"
    return f"{case} (fold {fold}{seed})"


def _find_files(
    compared: Compared, c: Comparison, raw: Path, fold: int, case: str
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the ``dataset.json``, and the first channel, ground truth and predictions by title."""
    results, folders = compared.of_study, {}
    for entry in (c.reference, c.entry):
        run = results.run(fold, compared.trainer(entry, fold), c.seeds[0])
        folders[entry.full_title] = run.folder(results.folder)
    dataset = read_dataset_json(folders[c.entry.full_title])
    ending = dataset.get("file_ending", ".nii.gz")
    data = raw / c.condition.dataset
    files = {
        "image": data / "imagesTr" / f"{case}_0000{ending}",
        "ground truth": data / "labelsTr" / f"{case}{ending}",
    }
    of_trainers = {t: folder / "validation" / f"{case}{ending}" for t, folder in folders.items()}
    return dataset, files | of_trainers


def read_slices(
    files: dict[str, Path], ignore: int | None = None
) -> tuple[np.ndarray, list[np.ndarray], float]:
    """Return the slice in which the predictions differ most, cropped to the structures.

    The voxels are turned to the patient orientation: axial slices have anterior on top and the patient's
    right side on the left. The slice lies across the axis with the largest voxels. Where predictions do
    not differ, it is that with the most wrong voxels.
    Voxels with the ignore label in the ground truth are neither wrong nor a structure.

    Returns:
        Grey values [rows, columns], the label maps alike, and the height of a voxel by its width.

    Raises:
        ValueError: the files differ in size.
        RuntimeError: a file cannot be read.
    """
    images = [_read(path) for path in files.values()]
    if len({image.GetSize() for image in images}) > 1:
        raise ValueError("image, ground truth and predictions differ in size")
    spacing = np.array(images[0].GetSpacing()[::-1])
    is_flat = images[0].GetSize()[2] == 1
    axis = 0 if is_flat else int(np.argmax(np.round(spacing, 3)))
    grey, truth, *predictions = (np.moveaxis(sitk.GetArrayFromImage(i), axis, 0) for i in images)
    counted = counted_voxels(truth, ignore)
    first, *others = predictions
    differ = sum(np.count_nonzero((p != first) & counted, axis=(1, 2)) for p in others)
    wrong = sum(np.count_nonzero((p != truth) & counted, axis=(1, 2)) for p in predictions)
    present = np.count_nonzero(truth * counted, axis=(1, 2))
    counts = next(filter(np.any, (differ, wrong)), present)
    slices = [array[int(np.argmax(counts))] for array in (grey, truth, *predictions)]
    rows, columns = np.nonzero(np.any(slices[1:], axis=0) & counted_voxels(slices[1], ignore))
    if rows.size:
        part = tuple(slice(max(0, e.min() - _MARGIN), e.max() + _MARGIN + 1) for e in (rows, columns))
        slices = [array[part] for array in slices]
    if axis:
        slices = [array[::-1] for array in slices]  # superior on top
    height, width = np.delete(spacing, axis)
    return slices[0], slices[1:], float(height / width)


def _read(path: Path) -> sitk.Image:
    """Return a 3D image of one channel in the patient orientation LPS."""
    image = sitk.ReadImage(str(path))
    if image.GetNumberOfComponentsPerPixel() > 1:
        image = sitk.VectorIndexSelectionCast(image, 0)
    return sitk.JoinSeries(image) if image.GetDimension() == 2 else sitk.DICOMOrient(image, "LPS")


def draw_case(files: dict[str, Path], dataset: dict[str, Any], title: str, name: str) -> Picture:
    """Draw a slice of a case: the ground truth and two predictions on the image."""
    ignore = ignore_label(dataset)
    grey, labels, aspect = read_slices(files, ignore)
    channels = dataset.get("channel_names") or dataset.get("modality") or {}
    is_ct = isinstance(channels, dict) and str(channels.get("0", "")).casefold() == "ct"
    low, high = _CT_WINDOW if is_ct else np.percentile(grey, [1, 99])
    labels_json = dict(dataset.get("labels") or {})
    names = {key: name for name, value in labels_json.items() for key in class_key(value)}
    present = sorted({int(value) for array in labels for value in np.unique(array)} - {0})
    height = 1.2 + 2.9 * min(2.0, aspect * grey.shape[0] / grey.shape[1])
    with styled_figure((9, height), STYLE) as figure:
        panels = figure.subplots(1, len(labels))
        for axes, heading, label_map in zip(panels, list(files)[1:], labels, strict=True):
            axes.imshow(grey, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), aspect=aspect)
            overlay = _colors(label_map)
            overlay[..., 3] = 0.5 * (label_map > 0)
            axes.imshow(overlay, aspect=aspect)
            axes.set_title(short(heading))
            axes.set_axis_off()
        titles = {value: short(str(names.get(value, f"label {value}"))) for value in present}
        patches = [Patch(color=tuple(_colors(value)), label=title) for value, title in titles.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        figure.suptitle(title, fontsize=9, parse_math=False)
        counted = counted_voxels(labels[0], ignore)
        wrong = [int(np.count_nonzero((each != labels[0]) & counted)) for each in labels[1:]]
        alt = f"{title}. Wrong pixels of the slice: {wrong[0]} and {wrong[1]}."
        return save(figure, f"case-{name}", alt, suffixes=["png"])


def _colors(values: Any) -> np.ndarray:
    """Return the color of each label, [..., RGBA]."""
    return np.asarray(matplotlib.colormaps["tab10"]((np.asarray(values) - 1) % 10))
