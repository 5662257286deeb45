from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.goldens import run_command
from tests.golden.study_files import make_data

STUDY = "datasets: Dataset901_Golden\nfolds: [0]\ntrainers: [nnUNetTrainerSGD, nnUNetTrainerCPR]\n"
FILES = {
    "good.yaml": STUDY,
    "no_yaml.yaml": "trainers: [nnUNetTrainerCPR\n",
    "wrong_key.yaml": STUDY + "trainer_names: 1\n",
    "no_trainers.yaml": "datasets: Dataset901_Golden\n",
    "wrong_trainer.yaml": STUDY.replace("CPR", "CPR_ws2k"),
    "wrong_metric.yaml": STUDY + "metrics: [dice, jaccard]\n",
    "wrong_reference.yaml": STUDY + "reference: nnUNetTrainerMuon\n",
    "same_twice.yaml": STUDY.replace("SGD", "CPR"),
    "wrong_fold.yaml": STUDY.replace("[0]", "[0, 900]"),
    "no_number.yaml": STUDY.replace("[0]", "[zero]"),
}
MISTAKES = [
    # Study files
    (("study", "run", "nowhere.yaml"), ["nowhere.yaml"]),
    (("study", "run", "no_yaml.yaml"), ["no_yaml.yaml"]),
    (("study", "run", "wrong_key.yaml"), ["wrong_key", "trainer_names"]),
    (("study", "run", "no_trainers.yaml"), ["no_trainers", "trainers"]),
    (("study", "run", "no_number.yaml"), ["no_number", "folds"]),
    (("study", "run", "wrong_metric.yaml"), ["wrong_metric", "jaccard", "hd95"]),
    (("study", "run", "wrong_reference.yaml"), ["wrong_reference", "nnUNetTrainerMuon"]),
    (("study", "run", "same_twice.yaml"), ["same_twice", "nnUNetTrainerCPR"]),
    # Trainers and data of a study
    (("study", "run", "wrong_trainer.yaml"), ["nnUNetTrainerCPR_ws2k", "nnUNetTrainerCPR_ws2000"]),
    (("study", "run", "wrong_fold.yaml"), ["900", "Dataset901_Golden", "601"]),
    (("study", "run", "good.yaml", "-d", "Dataset777_Gone"), ["Dataset777_Gone", "nnUNet_raw"]),
    (("study", "run", "good.yaml", "-d", "777"), ["777"]),
    (("study", "run", "good.yaml", "-p", "MyPlans"), ["Dataset901_Golden"]),
    (("study", "run", "good.yaml", "-c", "3d_lowres"), ["3d_lowres", "3d_fullres"]),
    (("study", "run", "quick"), ["quick", "--dataset"]),
    # Options
    (("study", "run", "good.yaml", "--folds", "a"), ["--folds"]),
    (("study", "run", "good.yaml", "--time", "60"), ["--time", "slurm"]),
    (("study", "run", "good.yaml", "-num_gpus", "2"), ["-num_gpus", "--gpus 2"]),
    (("export", "gone__nnUNetPlans__3d_fullres", "-f", "0,0"), ["--folds"]),
    (("study", "run", "good.yaml", "--name", ".."), ["'..'"]),
    (("study", "new", "slow", "mine.yaml"), ["slow", "hippocampus"]),
    (("study", "new", "quick", "good.yaml"), ["good.yaml"]),
    # Results that are missing
    (("study", "report", "good.yaml"), ["good", "validation/summary.json"]),
    (("study", "status", "gone"), ["gone"]),
    (("study", "cancel", "gone"), ["gone"]),
    (("export", "gone__nnUNetPlans__3d_fullres"), ["gone__nnUNetPlans__3d_fullres"]),
    # Other commands
    (("prepare", "abdomen", "archive"), ["abdomen", "hippocampus"]),
    (("prepare", "hippocampus", "archive"), ["archive"]),
    (("prepare", "hippocampus", ".", "--name", "a/b"), ["--name", "a/b"]),
    (("demo", "--folder", "."), ["--folder"]),
    (("trainers", "nnUNetTrainerCRP"), ["nnUNetTrainerCRP", "nnUNetTrainerCPR"]),
    (("vision", "run", "digit", "SGD"), ["digit", "digits"]),
    (("vision", "run", "digits", "SDG"), ["SDG", "SGD"]),
    (("vision", "run", "digits", "SGD", "--device", "nowhere"), ["--device", "nowhere"]),
]
"""Commands with a mistake, and words of the message: the wrong object, and what to write instead."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("mistakes")
    environment = make_data(folder, ("Dataset901_Golden",))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder, environment


@pytest.mark.parametrize(
    ("arguments", "words"), MISTAKES, ids=["-".join(a).replace(" ", "") for a, _ in MISTAKES]
)
def test_mistake_is_one_line_that_names_it(
    arguments: tuple[str, ...], words: list[str], place: tuple[Path, dict[str, str]]
) -> None:
    folder, environment = place
    before = files_below(folder)
    done = run_command(*arguments, environment=environment, folder=folder)
    assert_refused(done.status, done.errors, words)
    assert files_below(folder) == before


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (("study", "run", "good.yaml"), "nnUNet_raw"),
        (("study", "run", "good.yaml"), "nnUNet_preprocessed"),
        (("study", "report", "good.yaml"), "nnUNet_results"),
        (("study", "list"), "nnUNet_results"),
        (("prepare", "hippocampus", "archive"), "nnUNet_raw"),
    ],
)
def test_missing_variable_is_named(
    arguments: tuple[str, ...], variable: str, place: tuple[Path, dict[str, str]]
) -> None:
    folder, environment = place
    done = run_command(*arguments, environment={**environment, variable: ""}, folder=folder)
    assert_refused(done.status, done.errors, [variable])


@pytest.mark.parametrize(
    "arguments", [("studdy",), ("study", "run"), ("study", "run", "good.yaml", "--jobbs", "2")]
)
def test_wrong_usage_has_status_2(arguments: tuple[str, ...]) -> None:
    assert run_command(*arguments).status == 2


def assert_refused(status: int, errors: str, words: list[str]) -> None:
    """Check for exit status 1 and one line with the words on stderr."""
    assert status == 1
    (line,) = errors.splitlines()
    assert line.startswith("nnunet-cpr: ")
    assert [word for word in words if word not in line] == [], line


def files_below(folder: Path) -> set[Path]:
    """Return the files below a folder, without the locks and logs of an attempt."""
    return {path for path in folder.rglob("*") if path.is_file()}
