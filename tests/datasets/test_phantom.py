from __future__ import annotations

import numpy as np
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
