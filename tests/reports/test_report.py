"""The whole report: its files, its page, figures and pictures of cases."""

import html
import io
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import SimpleITK as sitk
from rich.console import Console

from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.pictures import draw_case, read_slices
from nnunet_cpr.studies.study import TrainerEntry
from tests.reports.folds import (
    DATASET,
    NAN,
    both,
    sphere,
    study,
    whole,
    write_fold,
    write_log,
    write_volume,
)


class Page:
    """Alternative texts, headings and texts of a page, which refers to nothing outside of it."""

    def __init__(self, source):
        assert not re.search('(?:src|href)="(?!data:)', source), "external resource"
        self.images = [html.unescape(alt) for alt in re.findall('<img [^>]*alt="([^"]*)"', source)]
        headings = re.findall("<(?:h1|h2|summary)>(.*?)<", source)
        self.headings = [html.unescape(heading) for heading in headings]
        self.words = [html.unescape(text).strip() for text in re.split("<[^>]*>", source)]


def report(folder, planned, results, raw=None, preprocessed=None):
    """Write a report and return its folder, its page and the output."""
    console = Console(file=io.StringIO(), width=100)
    files = write_report(planned, results, raw, preprocessed, folder / "report", console)
    return files[0].parent, Page(files[0].read_text()), console.file.getvalue()


ENTRIES = (
    TrainerEntry("nnUNetTrainerSGD_6epochs", "3e-5", "weight <decay>"),
    TrainerEntry("nnUNetTrainerCPR_6epochs", "2k & more", "CPR"),
    TrainerEntry("TheirTrainer"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    planned = study(*ENTRIES)
    return report(folder, planned, *whole(folder, planned, cases=3)), folder


def test_report_answers_first(written):
    (folder, page, output), _ = written
    assert page.headings[:3] == ["Study toy", "Result", "Notes"]
    for kind in (
        "Differences of Dice to weight <decay> 3e-5",
        "Dice (%) of the runs of each",
        "Losses and",
    ):
        assert any(alt.startswith(kind) for alt in page.images), kind
    sentences = pd.read_csv(folder / "comparisons.csv")["sentence"]
    assert sentences[0].startswith("CPR 2k & more instead of weight <decay> 3e-5: ")
    assert sentences[0].endswith("; no verdict with 1 seed and 2 folds (3 and 2 are needed).")
    assert output.startswith(sentences[0]) and page.words.index(sentences[0]) < 60
    assert sentences[1] in page.words and sentences[1] in output


def test_all_files_have_the_same_results(written):
    (folder, _, output), _ = written
    assert sorted(path.name for path in folder.iterdir()) == [
        "cases.csv", "comparisons.csv", "figures", "non_inferiority.csv",
        "report.html", "report.md", "report.tex", "table.csv",
    ]  # fmt: skip
    cases = pd.read_csv(folder / "cases.csv")
    by_hand = (
        cases[cases["trainer"] == "nnUNetTrainerCPR_6epochs"].groupby(["fold", "class"])["dice"].mean()
    )
    mean = 100 * by_hand.groupby("fold").mean().mean()
    assert pd.read_csv(folder / "table.csv").loc[1, "dice_percent"] == pytest.approx(mean)
    for text in (output, *(path.read_text() for path in folder.glob("report.*"))):
        assert f"{mean:.2f}" in text
    assert "CPR 2k & more instead of weight \\<decay\\> 3e-5" in (folder / "report.md").read_text()


def test_report_says_what_was_trained(written):
    output = written[0][2]
    assert "Trained in 3d_fullres with nnUNetPlans: weight <decay> 3e-5 is nnUNetTrainerSGD_6" in output
    assert "TheirTrainer is" not in output


def test_entries_have_their_own_places_in_csv_files_and_old_figures_go(tmp_path):
    """Whoever groups by configuration finds the one that was trained."""
    flat = TrainerEntry("nnUNetTrainerSGD_6epochs", configuration="2d", plans="nnUNetPlansFlat")
    planned = study("nnUNetTrainerSGD_6epochs", flat)
    old = ("runs-Dataset002_B-3d_fullres-Replaced-dice.svg", "mine.svg")
    (tmp_path / "report" / "figures").mkdir(parents=True)
    for name in old:
        (tmp_path / "report" / "figures" / name).touch()
    (tmp_path / "report" / "over_datasets.csv").touch()  # of a report on three data sets
    results, *_ = whole(tmp_path, study("nnUNetTrainerSGD_6epochs"), cases=3)
    shutil.copytree(*(run.folder(results).parent for run in planned.runs() if run.fold == 0))
    folder, *_ = report(tmp_path, planned, results)
    for name in ("table.csv", "cases.csv"):
        rows = pd.read_csv(folder / name)
        places = rows.groupby("trainer")[["configuration", "plans"]].agg(set).to_dict("index")
        assert places == {
            "nnUNetTrainerSGD_6epochs": {"configuration": {"3d_fullres"}, "plans": {"nnUNetPlans"}},
            flat.key: {"configuration": {"2d"}, "plans": {"nnUNetPlansFlat"}},
        }
    assert not (folder / "over_datasets.csv").exists()
    kept = {path.name for path in (folder / "figures").iterdir()}
    assert old[0] not in kept and old[1] in kept and len(kept) > 3


def test_equal_results_give_equal_bytes(written):
    (folder, _, _), place = written
    planned = study(*ENTRIES)
    names = ("nnUNet_results", "nnUNet_raw", "nnUNet_preprocessed")
    again, _, _ = report(place / "again", planned, *(place / name for name in names))
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert (again / path.relative_to(folder)).read_bytes() == path.read_bytes(), path


def test_worst_median_and_best_case_have_pictures_or_a_reason(written):
    (folder, page, _), place = written
    for kind in ("worst", "median", "best"):
        (alt,) = [alt for alt in page.images if alt.startswith(f"{kind} case, case_")]
        assert re.search(
            r"\(fold [01]\): [+-][\d.]+ points of Dice\. Wrong pixels of the slice: \d+ and", alt
        )
    assert any(alt.startswith("lowest Dice of") for alt in page.images)
    assert len(list((folder / "figures").glob("case-*.png"))) == 4
    (place / "nnUNet_raw" / DATASET / "imagesTr").rename(place / "elsewhere")
    folders = (place / "nnUNet_results", place / "nnUNet_raw")
    _, without, _ = report(place / "without", study(*ENTRIES), *folders)
    (place / "elsewhere").rename(place / "nnUNet_raw" / DATASET / "imagesTr")
    reasons = [words for words in without.words if words.startswith("No picture of case_")]
    assert (
        len(reasons) == 1
        and reasons[0].count("case_") == 5
        and all(reason.endswith('_0000.nii.gz" does not exist.') for reason in reasons)
    )


def test_same_name_in_two_folds_is_two_cases(tmp_path):
    """The case that fails in fold 0 is that of the largest gain in fold 1."""
    planned, names = study("A", "B"), ("one", "two", "three")
    for run in planned.runs():
        dice = {name: both(0.8) for name in names}
        if run.trainer == "B":
            dice["one"] = both((0.05, 0.9)[run.fold])
        folder = write_fold(tmp_path, run.trainer, run.fold, dice) / "validation"
        for name in names:
            write_volume(sphere(9), folder / f"{name}.nii.gz")
    for name in names:
        write_volume(sphere(9), tmp_path / "raw" / DATASET / "imagesTr" / f"{name}_0000.nii.gz")
        write_volume(sphere(9), tmp_path / "raw" / DATASET / "labelsTr" / f"{name}.nii.gz")
    _, page, _ = report(tmp_path, planned, tmp_path, raw=tmp_path / "raw")
    for start in ("failed case of B, one (fold 0): 5.00 %", "best case, one (fold 1): +10.00 points"):
        assert any(alt.startswith(start) for alt in page.images), start


@pytest.mark.filterwarnings("error")
def test_training_that_was_never_finite_has_curves(tmp_path):
    planned = study("A", folds=(0,))
    folder = write_fold(tmp_path, "A", 0, {"one": both(0.8)})
    write_log(folder, {epoch: (NAN, NAN, NAN, 20.0) for epoch in range(3)})
    _, page, output = report(tmp_path, planned, tmp_path)
    assert "the training diverged (its loss is not a number)" in output
    assert "Losses and pseudo Dice over the epochs." in page.images


@pytest.mark.parametrize("orientation", ["LPS", "RAS", "SAR", "PIR"])
@pytest.mark.parametrize("spacing", [(1.0, 1.5, 2.0), (1.0, 3.0, 2.0), (3.0, 1.5, 2.0)])
def test_pictures_are_upright_in_every_orientation(tmp_path, orientation, spacing):
    """The marker is on the patient's left, anterior and superior side."""
    image = np.zeros((20, 24, 30), np.int16)  # z, y, x in LPS
    image[12:14, 8:10, 19:22] = 100
    truth, wrong = np.zeros_like(image), np.zeros_like(image)
    truth[6:14, 8:16, 10:22] = wrong[6:14, 8:16, 10:22] = 1
    wrong[13, 9, 20] = 0
    files = {}
    for name, array in {"image": image, "truth": truth, "wrong": wrong, "right": truth}.items():
        volume = sitk.GetImageFromArray(array)
        volume.SetSpacing(spacing)
        files[name] = tmp_path / f"{name}.nii.gz"
        sitk.WriteImage(sitk.DICOMOrient(volume, orientation), str(files[name]))
    grey, labels, aspect = read_slices(files)
    across = int(np.argmax(spacing))  # the axis x, y or z with the largest voxels
    width, height = np.delete(spacing, across)
    assert aspect == pytest.approx(height / width)
    rows, columns = np.nonzero(grey == 100)
    is_left = columns.mean() > grey.shape[1] / 2  # of the picture: right
    assert rows.mean() < 0.4 * grey.shape[0], "anterior or superior on top"
    assert is_left == (across > 0), (
        "the patient's left side on the right; sagittal: anterior on the left"
    )
    assert [np.count_nonzero(each != labels[0]) for each in labels] == [0, 1, 0]


def test_picture_of_a_colour_image_shows_its_first_channel(tmp_path):
    colours, labels = np.zeros((40, 60, 3), np.uint8), np.zeros((40, 60), np.uint8)
    colours[..., 0], labels[10:20, 10:20] = 7, 1
    files = {name: tmp_path / f"{name}.png" for name in ("image", "truth", "ours")}
    sitk.WriteImage(sitk.GetImageFromArray(colours, isVector=True), str(files["image"]))
    for name in ("truth", "ours"):
        sitk.WriteImage(sitk.GetImageFromArray(labels), str(files[name]))
    grey, maps, aspect = read_slices(files)
    assert (grey == 7).all() and [each.sum() for each in maps] == [100, 100] and aspect == 1


def test_pictures_do_not_count_ignored_voxels(tmp_path):
    """The slice of most wrong voxels is the first one, but for those that the truth ignores."""
    truth = np.zeros((6, 40, 40), np.uint8)
    truth[1, 2:38, 2:38], truth[4, 10:20, 10:20] = 3, 1
    prediction = np.where(truth == 3, 1, 0)
    files = {name: tmp_path / f"{name}.nii.gz" for name in ("image", "truth", "A", "B")}
    for path, array in zip(files.values(), (truth, truth, prediction, prediction)):
        write_volume(array.astype(np.uint8), path)
    dataset = {"labels": {"background": 0, "liver": 1, "ignore": 3}}
    picture = draw_case(files, dataset, "best case", "best")
    assert picture.alt == "best case. Wrong pixels of the slice: 100 and 100."
    assert read_slices(files, 3)[1][0].max() == 1 and read_slices(files)[1][0].max() == 3
    for name in ("A", "B"):  # without wrong voxels the slice is that of the most foreground
        write_volume(truth % 3, files[name])
    assert draw_case(files, dataset, "", "").alt.endswith(" 0 and 0.")
    assert read_slices(files, 3)[1][0].shape == (30, 30)


@pytest.mark.parametrize(
    "kind",
    [
        *("one trainer", "one has finished", "no foreground", "two data sets"),
        *("three data sets", "one of three data sets", "one has finished of three data sets"),
    ],
)
def test_unusual_studies_have_a_report_without_nan(tmp_path, kind):
    trainers = ("A",) if kind == "one trainer" else ("A", "B")
    datasets = (DATASET, "Dataset002_Other") if kind == "two data sets" else (DATASET,)
    if "three" in kind:
        datasets = (DATASET, "Dataset002_Other", "Dataset003_Another")
    cases = {
        f"c{i}": {"1": 0.7 + 0.01 * i, "2": NAN if kind == "no foreground" else 0.5} for i in range(6)
    }
    for dataset in datasets[: 1 if kind == "one of three data sets" else None]:
        for trainer in trainers[: 1 if kind.startswith("one has finished") else None]:
            write_fold(tmp_path, trainer, 0, cases, dataset)
    folder, page, output = report(tmp_path, study(*trainers, datasets=datasets, folds=(0,)), tmp_path)
    assert "trainer" in pd.read_csv(folder / "comparisons.csv")
    assert "72.50" in output or "61.25" in output
    assert [words for words in page.words if "nan" in words.lower().split()] == []
    assert ("er on 0 of 3 (" in output) == (kind == "three data sets")
    assert not any(title.startswith("Cases") for title in page.headings), "without pictures"


BROWSER = next(
    (p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None
)


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_page_fits_a_phone_without_errors(written, tmp_path):
    # The window of a headless browser may be wider than asked for: a frame is as wide as it says.
    (folder, _, _), _ = written
    script = (
        "<script>document.querySelectorAll('details').forEach(d => d.open = true);"
        "const seen = document.documentElement;"
        "parent.postMessage([seen.clientWidth, seen.scrollWidth].join(' '), '*');</script>"
    )
    page = (folder / "report.html").read_text().replace("</body>", script + "</body>")
    (tmp_path / "copy.html").write_text(page)
    (tmp_path / "frame.html").write_text(
        "<script>addEventListener('message', e => document.body.dataset.widths = e.data)</script>"
        '<body><iframe src="copy.html" style="width:390px;height:800px;border:0"></iframe></body>'
    )
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,800", "--dump-dom"]
    command += ["--virtual-time-budget=3000", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    found = re.search(r'data-widths="(\d+) (\d+)"', done.stdout)
    assert found and int(found[2]) <= int(found[1]) <= 390
