"""Pictures of cases: a slice of the image with the contours of ground truth and predictions."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import SimpleITK as sitk

from nnunet_cpr._figures import new_figure
from nnunet_cpr.reports.comparisons import Comparison
from nnunet_cpr.reports.results import Results, full_title, read_dataset_json

TRUTH, REFERENCE, OTHER = "#f0e442", "#56b4e9", "#ff7f2a"
"""Light colours on a grey image, distinguishable with red-green colour blindness."""
_PIXELS = 360
_MARGIN = 0.25
"""Margin around the structures, relative to their size."""


@dataclass(frozen=True)
class Panel:
    """Picture as a data URI."""

    title: str
    source: str
    alt: str


@dataclass(frozen=True)
class Overlay:
    """Pictures of one case: the ground truth, the reference, and the other trainer."""

    rank: str
    case: str
    fold: int
    caption: str
    panels: tuple[Panel, ...]


def extreme_cases(comparison: Comparison) -> list[tuple[str, int, str]]:
    """Return the cases with the largest, median and smallest difference other - reference.

    Returns:
        (rank, fold, case); fewer than three if there are fewer cases.
    """
    differences = comparison.pairs["other"] - comparison.pairs["reference"]
    ranked = list(differences.sort_values(ascending=False, kind="stable").index)
    picks = {"largest": 0, "median": len(ranked) // 2, "smallest": len(ranked) - 1}
    chosen: dict[tuple[int, str], str] = {}
    for rank, position in picks.items():
        if ranked:
            chosen.setdefault(ranked[position], rank)
    return [(f"{rank} difference", fold, case) for (fold, case), rank in chosen.items()]


def overlays(
    results: Results, comparison: Comparison, raw: Path | None, preprocessed: Path | None
) -> tuple[list[Overlay], list[str]]:
    """Return the pictures of :func:`extreme_cases`, and a note for each case without one."""
    pictures, notes = [], []
    for rank, fold, case in extreme_cases(comparison):
        try:
            pictures.append(_overlay(results, comparison, raw, preprocessed, rank, fold, case))
        except (FileNotFoundError, ValueError) as error:
            notes.append(f"No picture of {case}: {error}.")
        except (OSError, RuntimeError):  # SimpleITK raises RuntimeError
            notes.append(f"No picture of {case}: a file cannot be read.")
    return pictures, notes


def _overlay(
    results: Results,
    comparison: Comparison,
    raw: Path | None,
    preprocessed: Path | None,
    rank: str,
    fold: int,
    case: str,
) -> Overlay:
    setting = comparison.setting
    seed = comparison.seeds[0]
    runs = [results.run(setting, fold, names[fold], seed) for names in comparison.trained]
    folders = [run.folder(results.folder) for run in runs]
    dataset = read_dataset_json(folders[0], setting.dataset, preprocessed, raw)
    ending = str(dataset.get("file_ending", ".nii.gz"))
    if raw is None:
        raise FileNotFoundError("nnUNet_raw is not set")
    image_file = _existing(raw / setting.dataset / "imagesTr" / f"{case}_0000{ending}", "image")
    truths = [raw / setting.dataset / "labelsTr" / f"{case}{ending}"]
    if preprocessed is not None:
        truths.insert(0, preprocessed / setting.dataset / "gt_segmentations" / f"{case}{ending}")
    truth_file = next((path for path in truths if path.is_file()), truths[-1])
    image, spacing = _read(image_file)
    truth, _ = _read(_existing(truth_file, "ground truth"))
    predictions = [
        _read(_existing(folder / "validation" / f"{case}{ending}", f"prediction of {title}"))[0]
        for folder, title in zip(folders, ["the reference", "the other trainer"])
    ]
    labels = [truth, *predictions]
    if any(array.shape != image.shape for array in labels):
        raise ValueError("image, ground truth and predictions differ in size")

    z = _most_wrong_slice(labels)
    planes = [array[z] for array in labels]
    rows, columns = _crop(planes, (spacing[1], spacing[2]))
    picture = image[z][rows, columns]
    planes = [plane[rows, columns] for plane in planes]
    aspect = spacing[1] / spacing[2]
    dice = comparison.pairs.loc[(fold, case)]
    names = [full_title(comparison.reference), full_title(comparison.entry)]
    where = f"slice {z + 1} of {len(image)} of {case}"
    panels = [
        Panel(
            "truth",
            _draw(picture, aspect, [(planes[0], TRUTH, "solid")]),
            f"{where} with the contours of the truth: {np.count_nonzero(planes[0])} foreground pixels.",
        )
    ]
    for name, colour, plane, value in zip(
        names, (REFERENCE, OTHER), planes[1:], (dice["reference"], dice["other"])
    ):
        panels.append(
            Panel(
                f"{name}: {value:.2f}",
                _draw(picture, aspect, [(plane, colour, "solid"), (planes[0], TRUTH, "dotted")]),
                f"{where} with the contours of {name}, Dice of the case {value:.2f} percent: "
                f"{np.count_nonzero(plane)} foreground pixels, {np.count_nonzero(plane != planes[0])} "
                "pixels differ from the truth.",
            )
        )
    caption = (
        f"{case}, fold {fold}, {dice['other'] - dice['reference']:+.2f} points; "
        f"slice {z + 1} of {len(image)}"
    )
    return Overlay(rank, case, fold, caption, tuple(panels))


def _existing(path: Path, kind: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{kind} {path.name} not found in {path.parent.name}")
    return path


def _read(path: Path) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Return voxels [z, y, x], of the first colour channel if any, and their spacing in mm."""
    image = sitk.ReadImage(str(path))
    if image.GetNumberOfComponentsPerPixel() > 1:
        image = sitk.VectorIndexSelectionCast(image, 0)
    array, spacing = sitk.GetArrayFromImage(image), image.GetSpacing()[::-1]
    if array.ndim == 2:
        return array[None], (1.0, spacing[0], spacing[1])
    if array.ndim != 3:
        raise ValueError(f"{path.name} has {array.ndim} dimensions")
    return array, (spacing[0], spacing[1], spacing[2])


def _most_wrong_slice(labels: list[np.ndarray]) -> int:
    """Return the slice with most wrong voxels, or without any the one with most foreground."""
    truth, *predictions = labels
    wrong = sum((array != truth).sum(axis=(1, 2)) for array in predictions)
    counts = wrong if np.any(wrong) else (truth > 0).sum(axis=(1, 2))
    return int(np.argmax(counts))


def _crop(planes: list[np.ndarray], spacing: tuple[float, float]) -> tuple[slice, slice]:
    """Return the part of the image in a square (in mm) around the foreground of all planes."""
    marked = np.any([plane > 0 for plane in planes], axis=0)
    if not marked.any():
        return slice(None), slice(None)
    positions = np.nonzero(marked)
    ends = [(int(p.min()), int(p.max()) + 1) for p in positions]
    side = max((last - first) * mm for (first, last), mm in zip(ends, spacing)) * (1 + 2 * _MARGIN)
    slices = []
    for (first, last), mm, length in zip(ends, spacing, marked.shape):
        middle, half = (first + last) / 2, side / mm / 2
        slices.append(slice(max(0, math.floor(middle - half)), min(length, math.ceil(middle + half))))
    return slices[0], slices[1]


def _draw(picture: np.ndarray, aspect: float, contours: list[tuple[np.ndarray, str, str]]) -> str:
    """Return a grey picture with the contours of all labels as data URI."""
    height, width = picture.shape[0] * aspect, picture.shape[1]
    scale = _PIXELS / 100 / max(height, width)
    webp = io.BytesIO()
    size = (width * scale, height * scale)
    with new_figure(webp, size, dpi=200, format="webp", pil_kwargs={"quality": 80}) as figure:
        figure.set_layout_engine("none")
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set_axis_off()
        low, high = np.percentile(picture, [1, 99])
        ax.imshow(picture, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), aspect="auto")
        for plane, colour, style in contours:
            for label in np.unique(plane[plane > 0]):
                mask = np.pad(plane == label, 1)  # closes contours at the edge of the picture
                y, x = np.arange(mask.shape[0]) - 1, np.arange(mask.shape[1]) - 1
                ax.contour(x, y, mask, levels=[0.5], colors=colour, linewidths=1.6, linestyles=style)
        ax.set(xlim=(-0.5, picture.shape[1] - 0.5), ylim=(picture.shape[0] - 0.5, -0.5))
    return "data:image/webp;base64," + base64.b64encode(webp.getvalue()).decode()
