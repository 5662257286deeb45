"""Studies by name: files, studies that have been run, and presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.nnunet.commands import nnunet_environment
from nnunet_cpr.studies.definition import PRESETS, StudyError, load, save
from nnunet_cpr.studies.lookup import find_study, save_study

TRAINERS = ["nnUNetTrainerSGD", "nnUNetTrainerCPR"]


@pytest.fixture
def studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty nnUNet_results/studies, and make its parent the working directory."""
    for name, value in nnunet_environment(tmp_path, processes=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    studies = tmp_path / "nnUNet_results" / "studies"
    studies.mkdir(parents=True)
    (tmp_path / "nnUNet_raw" / "Dataset501_Mine").mkdir(parents=True)
    return studies


@pytest.fixture
def command(studies: Path) -> Callable[..., str]:
    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, ["study", *arguments])
        assert done.exit_code == status, done.output
        return done.output

    return run


def write(path: Path, folds: list[int], dataset: str | int = "Dataset501_Mine") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"datasets": dataset, "folds": folds, "trainers": TRAINERS}))


def test_status_cancel_and_report_take_the_name_of_a_run_study(
    command: Callable[..., str], studies: Path
) -> None:
    write(studies / "mine" / "study.yaml", [0, 1, 2])
    said = command("status", "mine", "--once")
    assert "Study mine: 0 of 6 done" in said
    assert command("cancel", "mine").strip() == "0 jobs cancelled"
    assert "study 'mine'" not in command("report", "mine", status=1)
    assert "0 of 2 done" in command("status", "mine", "--once", "--folds", "1")


def test_run_study_is_preferred_to_a_preset_except_by_run(
    command: Callable[..., str], studies: Path, tmp_path: Path
) -> None:
    write(studies / "heart" / "study.yaml", [4])
    assert "Study heart: 0 of 2 done" in command("status", "heart", "--once")
    assert "Dataset002_Heart: not found" in command("run", "heart", status=1)
    (tmp_path / "heart").write_text((studies / "heart" / "study.yaml").read_text())
    write(tmp_path / "heart", [0, 1])
    assert "0 of 4 done" in command("status", "heart", "--once"), "a file comes first"


def test_status_of_a_preset_that_was_not_run_shows_the_preset(command: Callable[..., str]) -> None:
    assert "Study heart: 0 of 45 done" in command("status", "heart", "--once")


def test_name_option_selects_the_run_study(command: Callable[..., str], studies: Path) -> None:
    write(studies / "other" / "study.yaml", [0])
    assert "Study other: 0 of 2 done" in command("status", "heart", "--name", "other", "--once")
    assert "Study new: 0 of 45 done" in command("status", "heart", "--name", "new", "--once")


def test_study_without_data_set_keeps_the_one_it_was_run_with(
    command: Callable[..., str], studies: Path
) -> None:
    write(studies / "quick" / "study.yaml", [0, 3])
    assert "Dataset501_Mine: not found in nnUNet_raw" in command("run", "quick", status=1)


def test_changes_of_a_file_without_data_set_count(
    command: Callable[..., str], studies: Path, tmp_path: Path
) -> None:
    write(studies / "mine" / "study.yaml", [0])
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"folds": [0, 1, 2], "trainers": TRAINERS}))
    assert "Study mine: 0 of 6 done" in command("status", "mine.yaml", "--once")


def test_unknown_study_lists_what_exists(command: Callable[..., str], studies: Path) -> None:
    assert f"a study in {studies} (none) or a preset" in command("status", "mine", status=1)
    write(studies / "theirs" / "study.yaml", [0])
    for name in ("status", "report", "cancel", "run"):
        said = command(name, "mine", status=1)
        assert "study 'mine': expected a file, a study in" in said and "(theirs) or a preset" in said
        assert "choose from amos22, brats2020" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["../studies/mine", "..", ".", "", "a/b", "/etc"])
def test_paths_are_no_names_of_studies(name: str, studies: Path) -> None:
    write(studies / "mine" / "study.yaml", [0])
    write(studies / "study.yaml", [0])
    write(studies.parent / "study.yaml", [0])
    with pytest.raises(StudyError, match="expected a file, a study in"):
        find_study(name, studies, saved_first=True)


def test_list_shows_the_progress_of_all_studies(command: Callable[..., str], studies: Path) -> None:
    assert command("list") == ""
    write(studies / "b" / "study.yaml", [0])
    write(studies / "a" / "study.yaml", [0, 1])
    (studies / "no-study").mkdir()
    first, second = command("list").splitlines()
    assert first.split() == ["a", "0", "of", "4", "done;", "Dataset501_Mine"]
    assert second.startswith("b ") and "0 of 2 done" in second
    (studies / "a" / "study.yaml").write_text("future: 1")
    first, second = command("list").splitlines()
    assert first.startswith("a ") and "future" in first
    assert second.startswith("b ") and "0 of 2 done" in second


@pytest.mark.parametrize("number", [501, "501", [501]])
def test_data_set_numbers_become_names(
    number: object, command: Callable[..., str], tmp_path: Path
) -> None:
    write(tmp_path / "mine.yaml", [0], number)  # type: ignore[arg-type]
    assert "Dataset501_Mine: not found in nnUNet_raw" in command("run", "mine.yaml", status=1)
    write(tmp_path / "mine.yaml", [0], 77)
    assert "data set 77: expected one Dataset077_*" in command("run", "mine.yaml", status=1)


def test_folds_of_several_commands_are_saved_together(studies: Path) -> None:
    heart = load(str(PRESETS / "heart.yaml"))
    folder = studies / "heart"
    folder.mkdir()
    save_study(heart.changed(folds=[1]), folder, is_part=True)
    save_study(heart.changed(folds=[0]), folder, is_part=True)
    assert load(str(folder / "study.yaml")) == heart.changed(folds=[0, 1])
    other = heart.changed(folds=[2], datasets=["Dataset501_Mine"])
    save_study(other, folder, is_part=True)
    assert load(str(folder / "study.yaml")) == other, "another data set is another study"
    save_study(other.changed(folds=[3]), folder, is_part=False)
    assert load(str(folder / "study.yaml")).folds == (3,), "the file lists its folds"


def test_seeds_of_several_commands_are_saved_together(studies: Path) -> None:
    heart = load(str(PRESETS / "heart.yaml"))
    for seeds in ([2], [1]):
        save_study(heart.changed(seeds=seeds), studies, is_part=True)
    assert load(str(studies / "study.yaml")).seeds == (1, 2)
    save_study(heart.changed(folds=[0], seeds=[3]), studies, is_part=True)
    assert load(str(studies / "study.yaml")) == heart.changed(seeds=[1, 2, 3])
    save(heart, studies / "study.yaml")
    save_study(heart.changed(seeds=[1]), studies, is_part=True)
    assert load(str(studies / "study.yaml")).seeds == (1,)
