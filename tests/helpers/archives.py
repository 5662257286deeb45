"""Tiny archives with the layout of the real ones, oblique axes and anisotropic spacing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import SimpleITK as sitk

SIZE = (12, 10, 8)  # x, y, z
SPACING = (0.75, 0.9, 2.5)
ORIGIN = (-171.5, 20.25, -300.125)
_ANGLE = 0.3
DIRECTION = (
    *(-np.cos(_ANGLE), np.sin(_ANGLE), 0.0),
    *(-np.sin(_ANGLE), -np.cos(_ANGLE), 0.0),
    *(0.0, 0.0, 1.0),
)


def write(path: Path, array: np.ndarray, **geometry: tuple[float, ...]) -> None:
    """Write voxels in the order z, y, x with the geometry above unless another one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sitk.GetImageFromArray(array)
    image.SetSpacing(geometry.get("spacing", SPACING))
    image.SetOrigin(geometry.get("origin", ORIGIN))
    image.SetDirection(geometry.get("direction", DIRECTION))
    sitk.WriteImage(image, str(path), useCompression=True)


def picture(seed: int, dtype: type = np.int16) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 300, SIZE[::-1]).astype(dtype)


def labels(seed: int, values: tuple[int, ...], dtype: type = np.uint8) -> np.ndarray:
    """Return labels that contain every value."""
    array = np.random.default_rng(1000 + seed).choice(values, SIZE[::-1]).astype(dtype)
    array.ravel()[: len(values)] = values
    return array


def cut(path: Path, part: float = 0.6) -> None:
    """Truncate a file as an interrupted download does."""
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])


def read(path: Path) -> np.ndarray:
    return sitk.GetArrayFromImage(sitk.ReadImage(str(path)))


def make_btcv(folder: Path, cases: int = 4, unseen: int = 1) -> Path:
    training = folder / "Abdomen" / "RawData" / "Training"
    for n in range(1, cases + 1):
        write(training / "img" / f"img{n:04d}.nii.gz", picture(n))
        write(training / "label" / f"label{n:04d}.nii.gz", labels(n, tuple(range(14)), np.float32))
    for n in range(61, 61 + unseen):
        write(training.parent / "Testing" / "img" / f"img{n:04d}.nii.gz", picture(n))
    return folder / "Abdomen"


def make_brats(folder: Path, cases: int = 3) -> Path:
    root = folder / "MICCAI_BraTS2020_TrainingData"
    for n in range(1, cases + 1):
        name = f"BraTS20_Training_{n:03d}"
        for m, modality in enumerate(("flair", "t1", "t1ce", "t2")):
            write(root / name / f"{name}_{modality}.nii", picture(10 * n + m))
        write(root / name / f"{name}_seg.nii", labels(n, (0, 1, 2, 4), np.int16))
    (root / "name_mapping.csv").write_text("Grade\n")
    return root


def make_decathlon(folder: Path, task: str = "Task02_Heart", cases: int = 3) -> Path:
    root = folder / task
    names = [f"la_{n:03d}" for n in range(3, 3 + cases)]
    for n, name in enumerate(names):
        write(root / "imagesTr" / f"{name}.nii.gz", picture(n, np.float32))
        write(root / "labelsTr" / f"{name}.nii.gz", labels(n, (0, 1)))
        (root / "imagesTr" / f"._{name}.nii.gz").write_bytes(b"\x00\x05\x16\x07")  # macOS leaves them
    write(root / "imagesTs" / "la_001.nii.gz", picture(50, np.float32))
    description = {
        "name": "LeftAtrium",
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "left atrium"},
        "numTraining": cases,
        "numTest": 1,
        "training": [
            {"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"}
            for name in names
        ],
        "test": ["./imagesTs/la_001.nii.gz"],
    }
    (root / "dataset.json").write_text(json.dumps(description))
    return root


def make_amos(folder: Path, training: tuple[int, ...] = (1, 4, 507)) -> Path:
    """Write training cases, a validation and a test case of CT; numbers above 410 are MRI."""
    root = folder / "amos22"
    organs = [f"organ {n}" for n in range(1, 16)]
    parts = {"training": ("Tr", training), "validation": ("Va", (8,)), "test": ("Ts", (2,))}
    lists: dict[str, list[dict[str, str]]] = {}
    for part, (ending, numbers) in parts.items():
        lists[part] = []
        for n in numbers:
            name = f"amos_{n:04d}.nii.gz"
            write(root / f"images{ending}" / name, picture(n))
            lists[part].append({"image": f"./images{ending}/{name}"})
            if part != "test":
                write(root / f"labels{ending}" / name, labels(n, tuple(range(16))))
                lists[part][-1]["label"] = f"./labels{ending}/{name}"
    named = {"0": "background", **{str(n): name for n, name in enumerate(organs, 1)}}
    (root / "dataset.json").write_text(
        json.dumps({"modality": {"0": "CT"}, "labels": named, "numTraining": 3, **lists})
    )
    return root
