"""Synthetic 3-D data set in nnU-Net's raw format.

Each case has two touching structures of random smooth shape, labels 1 and 2, in tissue of another
intensity and next to a third, unlabelled structure that looks like the first. Images are rendered at
twice the resolution and averaged, which gives partial volumes at the borders, then multiplied by a bias
field and corrupted by Rician noise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import SimpleITK as sitk
from scipy.ndimage import gaussian_filter

SHAPE = (40, 48, 40)
SPACING = (1.0, 1.0, 1.2)  # mm, in SimpleITK's order x, y, z
LABELS = {"background": 0, "body": 1, "head": 2}
_INTENSITY = {"outside": 0.1, "tissue": 0.45, "body": 0.75, "head": 0.95, "neighbour": 0.72}


def make_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the image (float32) and the labels (uint8) of one case, both of :data:`SHAPE`.

    Example:
        >>> image, labels = make_case(0)
        >>> image.shape == labels.shape == SHAPE
        True
    """
    rng = np.random.default_rng(seed)
    fine = tuple(2 * n for n in SHAPE)
    axes = np.meshgrid(*[np.linspace(-1, 1, n) for n in fine], indexing="ij")

    def blob(centre: np.ndarray, radii: np.ndarray, roughness: float = 0.25) -> np.ndarray:
        distance = np.sqrt(sum(((x - c) / r) ** 2 for x, c, r in zip(axes, centre, radii)))
        return distance - 1 + roughness * _smooth_noise(rng, fine, 9)

    middle = rng.uniform(-0.12, 0.12, 3)
    body = blob(middle, rng.uniform(0.36, 0.48, 3))
    head = blob(middle + [0, rng.uniform(0.4, 0.5), 0], rng.uniform(0.28, 0.38, 3))
    neighbour = blob(middle + [rng.uniform(0.5, 0.6), -0.1, 0], rng.uniform(0.2, 0.32, 3))
    tissue = blob(np.zeros(3), np.array([0.95, 0.95, 0.95]), roughness=0.1)

    picture = np.where(tissue < 0, _INTENSITY["tissue"], _INTENSITY["outside"])
    picture[neighbour < 0] = _INTENSITY["neighbour"]
    picture[body < 0] = _INTENSITY["body"]
    is_head = (head < 0) & (head < body)  # they share a border where they overlap
    picture[is_head] = _INTENSITY["head"]
    picture += 0.05 * _smooth_noise(rng, fine, 2)  # texture

    fractions = [_half(((body < 0) & ~is_head).astype(float)), _half(is_head.astype(float))]
    background = 1 - fractions[0] - fractions[1]
    labels = np.argmax(np.stack([background, *fractions]), axis=0).astype(np.uint8)
    image = _half(picture) * (1 + 0.15 * _smooth_noise(rng, SHAPE, 14))  # bias field
    image = np.hypot(image + rng.normal(0, 0.07, SHAPE), rng.normal(0, 0.07, SHAPE))  # Rician
    return (1000 * image).astype(np.float32), labels


def write_dataset(folder: Path, training_cases: int = 10, unseen_cases: int = 1) -> None:
    """Write ``imagesTr``, ``labelsTr``, ``imagesTs``, ``labelsTs`` and ``dataset.json``.

    Args:
        folder: new folder ``DatasetXXX_Name`` in ``nnUNet_raw``.
        training_cases, unseen_cases: number of cases; the unseen ones have labels for evaluation.
    """
    from nnunetv2.dataset_conversion.generate_dataset_json import generate_dataset_json

    for seed in range(training_cases + unseen_cases):
        part = "Tr" if seed < training_cases else "Ts"
        image, label = make_case(seed)
        _write(image, folder / f"images{part}" / f"phantom_{seed:03d}_0000.nii.gz")
        _write(label, folder / f"labels{part}" / f"phantom_{seed:03d}.nii.gz")
    generate_dataset_json(
        str(folder),
        channel_names={0: "MRI"},
        labels=LABELS,
        num_training_cases=training_cases,
        file_ending=".nii.gz",
        description="Synthetic phantoms",
    )


def _write(array: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sitk.GetImageFromArray(array.transpose(2, 1, 0))
    image.SetSpacing(SPACING)
    sitk.WriteImage(image, str(path), useCompression=True)


def _smooth_noise(rng: np.random.Generator, shape: tuple[int, ...], sigma: float) -> np.ndarray:
    """Return Gaussian noise, smoothed over ``sigma`` voxels, of mean 0 and standard deviation 1."""
    noise = gaussian_filter(rng.normal(size=shape), sigma, mode="wrap")
    return (noise - noise.mean()) / noise.std()


def _half(array: np.ndarray) -> np.ndarray:
    """Return the averages of blocks of 2 x 2 x 2."""
    a, b, c = (n // 2 for n in array.shape)
    return array.reshape(a, 2, b, 2, c, 2).mean(axis=(1, 3, 5))
