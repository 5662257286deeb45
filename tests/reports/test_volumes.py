from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk

from nnunet_cpr.reports.volumes import crop, most_wrong_slice, read_views, soft_tissue_window
from tests.helpers.report_folds import sphere

HIPPOCAMPUS = Path(__file__).parents[3] / "shared" / "data" / "Task04_Hippocampus"


def write_case(folder, orientation="LPS", oblique=False, spacing=(1.0, 1.5, 2.0), ending=".nii.gz"):
    """Write an image whose marker is on the patient's left, anterior and superior side."""
    image = np.zeros((20, 24, 30), np.int16)  # z, y, x in LPS
    image[12:14, 8:10, 19:22] = 100
    truth = np.zeros_like(image, dtype=np.uint8)
    truth[6:14, 8:16, 10:22] = 1
    prediction = truth.copy()
    prediction[13, 9, 20] = 0
    files = []
    for name, array in (("image", image), ("truth", truth), ("one", prediction), ("two", truth)):
        volume = sitk.GetImageFromArray(array)
        volume.SetSpacing(spacing)
        volume = sitk.DICOMOrient(volume, orientation)
        if oblique:
            angle = np.deg2rad(12)
            turn = np.array(
                [[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
            )
            volume.SetDirection((turn @ np.reshape(volume.GetDirection(), (3, 3))).ravel().tolist())
        files.append(folder / f"{name}{ending}")
        sitk.WriteImage(volume, str(files[-1]))
    return files


def middle(view):
    """Return the place of the marker: fractions of the height and the width of the picture."""
    rows, columns = np.nonzero(view.image == 100)
    return np.mean(rows) / view.image.shape[0], np.mean(columns) / view.image.shape[1]


@pytest.mark.parametrize("oblique", [False, True])
@pytest.mark.parametrize("orientation", ["LPS", "RAS", "LAI", "SAR", "PIR", "IAL"])
def test_views_are_upright_in_every_orientation(tmp_path, orientation, oblique):
    image, *labels = write_case(tmp_path, orientation, oblique)
    views, window = read_views(image, labels)
    assert [view.plane for view in views] == ["axial", "coronal", "sagittal"]
    axial, coronal, sagittal = views
    assert axial.edges == ("R", "L", "A", "P")
    assert coronal.edges == ("R", "L", "S", "I") and sagittal.edges == ("A", "P", "S", "I")
    assert middle(axial)[0] < 0.45 and middle(axial)[1] > 0.6  # anterior on top, left on the right
    assert middle(coronal)[0] < 0.45 and middle(coronal)[1] > 0.6  # superior on top
    assert middle(sagittal)[0] < 0.45 and middle(sagittal)[1] < 0.45  # anterior on the left
    # The slices go through the only wrong voxel and are counted from right, anterior and inferior.
    assert [view.position for view in views] == [14, 10, 21]
    assert [view.slices for view in views] == [20, 24, 30]
    assert [view.aspect for view in views] == pytest.approx([1.5, 2.0, 2 / 1.5])
    assert window == (0.0, 100.0)
    # Copies: the pictures outlive the images that they are read from.
    assert all(array.base is None for view in views for array in (view.image, *view.labels))


def test_distant_slices_give_one_view(tmp_path):
    image, *labels = write_case(tmp_path, "SAR", spacing=(1.0, 1.0, 5.0))
    (view,) = read_views(image, labels)[0]
    assert view.plane == "axial" and view.aspect == 1


def test_few_slices_give_one_view(tmp_path):
    files = []
    for name in ("image", "truth", "one", "two"):
        files.append(tmp_path / f"{name}.nii.gz")
        sitk.WriteImage(sitk.GetImageFromArray(sphere(9)[4:8]), str(files[-1]))
    assert [view.plane for view in read_views(files[0], files[1:])[0]] == ["axial"]


@pytest.mark.parametrize("ending", [".tif", ".nii.gz"])
def test_images_without_orientation_stay_as_stored(tmp_path, ending):
    if ending == ".tif":
        image, *labels = write_case(tmp_path, ending=ending)
    else:  # a NIfTI header may say that it has no orientation
        nibabel = pytest.importorskip("nibabel")
        image, *labels = write_case(tmp_path)
        for path in (image, *labels):
            stored = nibabel.load(path)
            plain = nibabel.Nifti1Image(np.asarray(stored.dataobj), None)
            plain.header.set_zooms(stored.header.get_zooms())
            nibabel.save(plain, path)
    (view,) = read_views(image, labels)[0]
    assert view.plane == "slice" and view.edges == ()


def test_2d_colour_images_have_one_view(tmp_path):
    colours = np.zeros((40, 60, 3), np.uint8)
    colours[..., 0] = 7
    sitk.WriteImage(sitk.GetImageFromArray(colours, isVector=True), str(tmp_path / "a.png"))
    labels = np.zeros((40, 60), np.uint8)
    labels[10:20, 10:20] = 1
    sitk.WriteImage(sitk.GetImageFromArray(labels), str(tmp_path / "b.png"))
    (view,) = read_views(tmp_path / "a.png", [tmp_path / "b.png"] * 3)[0]
    assert (view.plane, view.position, view.slices) == ("slice", 1, 1)
    assert (view.image == 7).all() and view.labels[0].sum() == 100


def test_ignored_voxels_do_not_count_as_wrong(tmp_path):
    image, truth, one, two = write_case(tmp_path)
    volume = sitk.ReadImage(str(truth))
    volume[12, 9, 7] = 9  # x, y, z
    sitk.WriteImage(volume, str(truth))
    assert [view.position for view in read_views(image, [truth, one, two], ignored=9)[0]] == [14, 10, 21]


def test_slice_has_most_wrong_voxels():
    truth = sphere(9)
    wrong = np.zeros_like(truth)
    wrong[2, 3, 3:6] = 1
    assert [most_wrong_slice(wrong, truth, axis) for axis in (0, 1, 2)] == [2, 3, 3]
    assert most_wrong_slice(np.zeros_like(truth), truth, 0) == 6  # the middle of the sphere


def test_crop_is_a_square_around_the_structures():
    plane = np.zeros((50, 100), int)
    plane[20:30, 40:60] = 1  # of 20 x 20 mm
    rows, columns = crop([plane, np.zeros_like(plane)], (2.0, 1.0))
    assert (rows, columns) == (slice(17, 33), slice(35, 65))
    assert crop([np.zeros((5, 5))], (1.0, 1.0)) == (slice(None), slice(None))


def test_tiny_structures_keep_surroundings():
    plane = np.zeros((100, 100), int)
    plane[50, 50] = 1
    rows, columns = crop([plane], (1.0, 1.0))
    assert rows.stop - rows.start >= 24 and columns.stop - columns.start >= 24


def test_files_of_different_sizes_are_refused(tmp_path):
    image, truth, *_ = write_case(tmp_path)
    sitk.WriteImage(sitk.GetImageFromArray(sphere(9)), str(tmp_path / "other.nii.gz"))
    with pytest.raises(ValueError, match="differ in size"):
        read_views(image, [truth, tmp_path / "other.nii.gz"])


def test_soft_tissue_window_has_level_40_width_400():
    assert soft_tissue_window() == (-160, 240)


@pytest.mark.skipif(not HIPPOCAMPUS.is_dir(), reason="the Hippocampus data are not there")
def test_mri_of_hippocampus_has_three_views():
    image = HIPPOCAMPUS / "imagesTr" / "hippocampus_001.nii.gz"
    labels = [HIPPOCAMPUS / "labelsTr" / "hippocampus_001.nii.gz"] * 3
    views, (low, high) = read_views(image, labels)
    assert [view.plane for view in views] == ["axial", "coronal", "sagittal"] and low < high
    # Label 1 is the anterior hippocampus.
    for view, axis in ((views[0], 0), (views[2], 1)):
        front, back = (np.nonzero(view.labels[0] == label)[axis].mean() for label in (1, 2))
        assert front < back
