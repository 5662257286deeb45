"""Study files: what they may say, and the presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnunet_cpr import KappaWS
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.studies.definition import Cell, Study, StudyError, load, presets, save

# The paper's table of segmentation results: weight decays 1e-5 to 1e-1, then warm starts of 1k to 4k.
PAPER = {
    "btcv": (500, 3, [83.04, 83.1, 83.17, 83.99, 73.92, 81.17, 84.14, 84.23, 55.41]),
    "heart": (100, 5, [92.92, 92.75, 92.88, 92.9, 92.85, 92.77, 93.18, 93.16, 74.44]),
    "brats2020": (100, 5, [75.85, 76.01, 76.22, 76.12, 75.42, 75.29, 76.46, 76.65, 75.63]),
}


@pytest.mark.parametrize("name", PAPER)
def test_presets_hold_the_papers_rows(name: str) -> None:
    study = load(name)
    epochs, folds, published = PAPER[name]
    (dataset,) = study.datasets
    assert list(study.folds) == list(range(folds))
    assert [row.published[dataset] for row in study.rows] == published
    settings = [parse_trainer_name(row.trainer) for row in study.rows]
    assert {(s.epochs, s.warmup, s.defaults.warmup) for s in settings} == {(epochs, None, 2000)}
    assert [s.weight_decay for s in settings[:5]] == [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    assert [s.kappa for s in settings[5:]] == [KappaWS(n) for n in (1000, 2000, 3000, 4000)]
    best = max(study.rows[:5], key=lambda row: row.published[dataset])
    assert study.reference == best.trainer


def test_every_preset_names_trainers_that_exist() -> None:
    assert set(presets()) == {*PAPER, "amos22", "hippocampus", "quick"}
    for name in presets():
        study = load(name)
        assert all(parse_trainer_name(row.trainer) is not None for row in study.rows)
    amos = load("amos22")
    assert [list(row.published.values()) for row in amos.rows] == [[89.45], [89.59]]
    assert amos.rows[1].trainer == "nnUNetTrainerCPR"  # a warm start of 1,000 steps, as in the paper


def write(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return str(folder / "mine.yaml")


def test_a_short_file_is_enough(tmp_path: Path) -> None:
    study = load(write(tmp_path, "datasets: Dataset001_A\ntrainers: [nnUNetTrainer, TheirTrainer]\n"))
    assert study.name == "mine" and study.reference == "nnUNetTrainer"
    cells = list(study.cells())
    assert len(cells) == 10
    assert cells[1] == Cell("Dataset001_A", "3d_fullres", "nnUNetPlans", 0, "TheirTrainer")
    expected = Path("r/Dataset001_A/TheirTrainer__nnUNetPlans__3d_fullres/fold_0")
    assert cells[1].folder(Path("r")) == expected


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    for name in presets():
        study = load(name)
        save(study, tmp_path / f"{name}.yaml")
        assert load(str(tmp_path / f"{name}.yaml")) == study


def test_options_replace_what_the_file_says() -> None:
    study = load("quick").changed("other", ["Dataset004_X"], [2, 0], ["2d"], ["nnUNetPlans"])
    assert [cell.fold for cell in study.cells()] == [2, 2, 0, 0]
    assert {cell.configuration for cell in study.cells()} == {"2d"} and study.name == "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "must be a mapping"),
        ("datasets: A\ntrainer: B", "unknown entry 'trainer'"),
        ("datasets: A", "must name at least one trainer"),
        ("datasets: A\ntrainers: [B, B]", "is there twice"),
        ("datasets: A\ntrainers: [B]\nreference: C", "reference C is not among"),
        ("datasets: A\ntrainers: ['B C']", "is no name of a trainer"),
        ("datasets: A\ntrainers: [{label: B}]", "a trainer is a name or a mapping"),
        ("datasets: A\ntrainers: [{trainer: B, published: x}]", "published of B"),
        ("datasets: A\ntrainers: [B]\nfolds: [-1]", "a fold is a number"),
        ("datasets: A\ntrainers: [B]\nfolds: all", "a fold is a number"),
        ("datasets: A\ntrainers: [B]\nfolds: []", "folds must be there"),
        ("datasets: [A, A]\ntrainers: [B]", "each once"),
        ("datasets: 4\ntrainers: [B]", "datasets must be names"),
        ("datasets: A\ntrainers: [B]\nname: a/b", "the name 'a/b'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=message) as caught:
        load(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_no_such_study() -> None:
    with pytest.raises(StudyError, match="presets are amos22, brats2020"):
        load("btcw")


def test_fold_numbers_are_checked_when_changed_too() -> None:
    with pytest.raises(StudyError, match="a fold is a number"):
        Study("a", ["A"], load("quick").rows, "nnUNetTrainerSGD").changed(folds=[-2])
