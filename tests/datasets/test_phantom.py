from __future__ import annotations

from pathlib import Path

import numpy as np
import SimpleITK as sitk
from scipy.ndimage import binary_dilation

from nnunet_cpr.datasets import phantom


def test_phantoms_have_two_touching_structures() -> None:
    cases = [phantom.make_case(seed) for seed in range(4)]
    for image, labels in cases:
        assert image.shape == labels.shape == phantom.SHAPE
        assert image.dtype == np.float32 and np.isfinite(image).all()
        assert min((labels == 1).sum(), (labels == 2).sum()) > 200
        # Intensities overlap, so that segmentation is not trivial.
        assert image[labels == 2].mean() > image[labels == 0].mean()
        assert (image[labels == 0] > np.quantile(image[labels == 1], 0.25)).sum() > 50
    assert any((binary_dilation(labels == 1) & (labels == 2)).any() for _, labels in cases)
    assert not np.array_equal(cases[0][0], cases[1][0])
    assert np.array_equal(cases[0][0], phantom.make_case(0)[0])


def test_phantom_data_set_has_nnunets_raw_format(tmp_path: Path) -> None:
    folder = tmp_path / "Dataset901_Phantoms"
    phantom.write_dataset(folder, training_cases=2)
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    assert names == [
        "dataset.json",
        "imagesTr/phantom_000_0000.nii.gz",
        "imagesTr/phantom_001_0000.nii.gz",
        "imagesTs/phantom_002_0000.nii.gz",
        "labelsTr/phantom_000.nii.gz",
        "labelsTr/phantom_001.nii.gz",
        "labelsTs/phantom_002.nii.gz",
    ]
    image = sitk.ReadImage(str(folder / "imagesTr" / "phantom_000_0000.nii.gz"))
    assert image.GetSize() == phantom.SHAPE and np.allclose(image.GetSpacing(), phantom.SPACING)
