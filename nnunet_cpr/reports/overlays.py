"""Pictures of cases: a slice of the image with the contours of truth and predictions."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import SimpleITK as sitk
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nnunet_cpr.reports.comparisons import Comparison
from nnunet_cpr.reports.results import Results, full_title, read_dataset_json

TRUTH, REFERENCE, OTHER = "#f0e442", "#56b4e9", "#ff7f2a"
"""Light on a grey image, told apart without red and green; beside a prediction the truth is dotted."""
_PIXELS = 360
_MARGIN = 0.25  # around the structures, as a share of their size


@dataclass(frozen=True)
class Panel:
    """One picture as a data URI."""

    title: str
    source: str
    alt: str


@dataclass(frozen=True)
class Overlay:
    """Three pictures of one case: the truth, the reference, the other trainer."""

    which: str
    case: str
    fold: int
    says: str
    panels: tuple[Panel, ...]


def extreme_cases(comparison: Comparison) -> list[tuple[str, int, str]]:
    """The cases with the largest, the middle and the smallest difference other - reference.

    Returns:
        (which, fold, case); fewer than three where there are fewer cases.
    """
    differences = comparison.pairs["other"] - comparison.pairs["reference"]
    ranked = list(differences.sort_values(ascending=False, kind="stable").index)
    picks = {"largest": 0, "median": len(ranked) // 2, "smallest": len(ranked) - 1}
    chosen: dict[tuple[int, str], str] = {}
    for which, position in picks.items():
        if ranked:
            chosen.setdefault(ranked[position], which)
    return [(f"{which} difference", fold, case) for (fold, case), which in chosen.items()]


def overlays(
    results: Results, comparison: Comparison, raw: Path | None, preprocessed: Path | None
) -> tuple[list[Overlay], list[str]]:
    """The pictures of :func:`extreme_cases`, and a line for each case that has none."""
    pictures, notes = [], []
    for which, fold, case in extreme_cases(comparison):
        try:
            pictures.append(_overlay(results, comparison, raw, preprocessed, which, fold, case))
        except (FileNotFoundError, ValueError) as error:
            notes.append(f"No picture of {case}: {error}.")
        except (OSError, RuntimeError):  # the latter is SimpleITK's
            notes.append(f"No picture of {case}: one of its files cannot be read.")
    return pictures, notes


def _overlay(
    results: Results,
    comparison: Comparison,
    raw: Path | None,
    preprocessed: Path | None,
    which: str,
    fold: int,
    case: str,
) -> Overlay:
    study, setting = results.study, comparison.setting
    cells = [results.cell(setting, fold, name) for name in (study.reference, comparison.row.trainer)]
    folders = [cell.folder(results.folder) for cell in cells]
    dataset = read_dataset_json(folders[0], setting.dataset, preprocessed, raw)
    ending = str(dataset.get("file_ending", ".nii.gz"))
    if raw is None:
        raise FileNotFoundError("the folder nnUNet_raw is not known")
    image_file = _there(raw / setting.dataset / "imagesTr" / f"{case}_0000{ending}", "its image")
    truths = [raw / setting.dataset / "labelsTr" / f"{case}{ending}"]
    if preprocessed is not None:
        truths.insert(0, preprocessed / setting.dataset / "gt_segmentations" / f"{case}{ending}")
    truth_file = next((path for path in truths if path.is_file()), truths[-1])
    image, spacing = _read(image_file)
    truth, _ = _read(_there(truth_file, "its truth"))
    predictions = [
        _read(_there(folder / "validation" / f"{case}{ending}", f"the prediction of {title}"))[0]
        for folder, title in zip(folders, ["the reference", "the other trainer"])
    ]
    labels = [truth, *predictions]
    if any(array.shape != image.shape for array in labels):
        raise ValueError("image, truth and predictions are not of the same size")

    z = _most_wrong_slice(labels)
    planes = [array[z] for array in labels]
    rows, columns = _crop(planes, (spacing[1], spacing[2]))
    picture = image[z][rows, columns]
    planes = [plane[rows, columns] for plane in planes]
    aspect = spacing[1] / spacing[2]
    dice = comparison.pairs.loc[(fold, case)]
    names = [full_title(study.row(study.reference)), full_title(comparison.row)]
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
    says = (
        f"{case}, fold {fold}, {dice['other'] - dice['reference']:+.2f} points; "
        f"slice {z + 1} of {len(image)}"
    )
    return Overlay(which, case, fold, says, tuple(panels))


def _there(path: Path, what: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{what} {path.name} is not in {path.parent.name}")
    return path


def _read(path: Path) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Voxels [z, y, x] and their spacing in mm in the same order; of colours the first."""
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
    """The slice where truth and predictions differ most, or, without any difference, the fullest one."""
    truth, *predictions = labels
    wrong = sum((array != truth).sum(axis=(1, 2)) for array in predictions)
    counts = wrong if np.any(wrong) else (truth > 0).sum(axis=(1, 2))
    return int(np.argmax(counts))


def _crop(planes: list[np.ndarray], spacing: tuple[float, float]) -> tuple[slice, slice]:
    """A square in mm, as far as the image goes, around everything that any of them marks."""
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
    """A data URI: the picture, grey from its 1st to its 99th percentile, and every label's contours."""
    height, width = picture.shape[0] * aspect, picture.shape[1]
    scale = _PIXELS / 100 / max(height, width)
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(width * scale, height * scale), dpi=200)
        FigureCanvasAgg(figure)
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set_axis_off()
        low, high = np.percentile(picture, [1, 99])
        ax.imshow(picture, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), aspect="auto")
        for plane, colour, style in contours:
            for label in np.unique(plane[plane > 0]):
                mask = np.pad(plane == label, 1)  # closed at the picture's edge
                y, x = np.arange(mask.shape[0]) - 1, np.arange(mask.shape[1]) - 1
                ax.contour(x, y, mask, levels=[0.5], colors=colour, linewidths=1.6, linestyles=style)
        ax.set(xlim=(-0.5, picture.shape[1] - 0.5), ylim=(picture.shape[0] - 0.5, -0.5))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="webp", pil_kwargs={"quality": 80})
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
