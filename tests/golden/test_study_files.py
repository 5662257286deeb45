from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.goldens import read_golden, run_command
from tests.golden.study_files import STUDIES, TRAINERS, folds_by_training, listed_runs, make_data

GOLDEN = read_golden("study_files")
PRESETS = sorted(path.stem for path in STUDIES if path.parent.name == "presets")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_data(tmp_path_factory.mktemp("studies"))


@pytest.fixture(autouse=True)
def trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nnU-Net search the trainers of the benchmarks as well."""
    import os

    ours = os.environ["nnUNet_extTrainer"]
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([ours, str(TRAINERS)]))


def test_golden_names_every_study_file() -> None:
    assert sorted(GOLDEN) == sorted(path.stem for path in STUDIES)
    runs = sum(len(folds) for trainings in GOLDEN.values() for folds in trainings.values())
    assert runs == 1232


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_study_file_gives_the_same_runs(file: Path, environment: dict[str, str]) -> None:
    runs = listed_runs(file, environment)
    assert len(set(map(tuple, runs))) == len(runs)
    assert folds_by_training(runs) == GOLDEN[file.stem]


def test_runs_are_listed_seed_by_seed_and_fold_by_fold(environment: dict[str, str]) -> None:
    """Early results then compare all trainers."""
    (file,) = (path for path in STUDIES if path.stem == "methods")
    runs = listed_runs(file, environment)
    trainers = len(runs) // 9
    assert [run[3] for run in runs[::trainers]] == 3 * [0, 1, 2]
    for i, (*_, trainer) in enumerate(runs):
        assert f"_seed{1 + i // (3 * trainers)}_" in trainer


@pytest.mark.parametrize("name", ["hippocampus", "quick"])
def test_dry_run_accepts_a_preset_and_writes_nothing(name: str, environment: dict[str, str]) -> None:
    options = ["--dataset", "Dataset901_Golden"] if name == "quick" else []
    before = set(Path(environment["nnUNet_results"]).rglob("*"))
    done = run_command("study", "run", name, "--dry-run", *options, environment=environment)
    assert done.status == 0, done.errors
    trainers = {training.split()[-1] for training in GOLDEN[name]}
    assert all(trainer in done.output for trainer in trainers)
    assert set(Path(environment["nnUNet_results"]).rglob("*")) == before


def test_presets_are_listed_and_copied(tmp_path: Path, environment: dict[str, str]) -> None:
    output = run_command("study", "presets", environment=environment).output
    assert sorted(line.split()[0] for line in output.splitlines()) == PRESETS
    runs = {line.split()[0]: line for line in output.splitlines()}
    assert runs["quick"].endswith(" 18 runs.")
    assert runs["networks"].endswith(" 15 runs, 45 with --seeds 1-3, which a verdict needs.")
    for name in PRESETS:
        assert run_command("study", "new", name, f"{name}.yaml", folder=tmp_path).status == 0
        (original,) = (path for path in STUDIES if path.stem == name)
        assert (tmp_path / f"{name}.yaml").read_bytes() == original.read_bytes()
