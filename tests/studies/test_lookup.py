"""Studies by name: files, studies that have been run, and presets."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.cli.study.options import PreparationOptions
from nnunet_cpr.nnunet.commands import nnunet_environment
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.study_file import load

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


def write(path: Path, folds: list[int], dataset: str | int = "Dataset501_Mine", **more: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    name = {"name": path.parent.name} if path.name == "study.yaml" else {}
    content = {"datasets": dataset, "folds": folds, "trainers": TRAINERS, **name, **more}
    path.write_text(yaml.safe_dump(content))


def test_run_study_is_preferred_to_a_preset_except_by_run(
    command: Callable[..., str], studies: Path, tmp_path: Path
) -> None:
    write(studies / "heart" / "study.yaml", [4])
    assert "Study heart: 0 of 2 done" in command("status", "heart", "--once")
    assert command("cancel", "heart").strip() == "0 jobs cancelled"
    assert "study 'heart'" not in command("report", "heart", status=1)
    assert "Dataset002_Heart: not found" in command("run", "heart", "--replace", status=1)
    write(tmp_path / "heart", [0, 1])
    assert "0 of 4 done" in command("status", "heart", "--once"), "a file comes first"


def test_list_shows_the_progress_of_all_studies(command: Callable[..., str], studies: Path) -> None:
    assert command("list") == ""
    write(studies / "b" / "study.yaml", [0])
    write(studies / "a" / "study.yaml", [0, 1])
    (studies / "no-study").mkdir()
    (studies / "0").mkdir()
    (studies / "0" / "study.yaml").write_text("trainers: [")
    bad, first, second = command("list").splitlines()
    assert bad.startswith("0 ") and "study.yaml: expected YAML" in bad
    assert first.split() == ["a", "0", "of", "4", "done;", "Dataset501_Mine"]
    assert second.startswith("b ") and "0 of 2 done" in second


def test_folds_and_seeds_of_several_commands_are_saved_together(
    studies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnunet_cpr.studies.check_study_data", lambda *_: [])
    monkeypatch.setattr("nnunet_cpr.studies.prepare_study_data", lambda *_: None)
    records: list[Path] = []
    monkeypatch.setattr("nnunet_cpr.studies.check_splits", lambda *given: records.append(given[2]))

    def saved(**options: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        given = PreparationOptions("mine.yaml", ["501"], **options)
        given.prepare(given.select(saved_first=False), Console(quiet=True))
        study = load(str(studies / "mine" / "study.yaml"))
        return study.folds, study.seeds

    write(tmp_path / "mine.yaml", [0, 1, 2])
    assert saved(folds="1") == ((1,), ())
    assert saved(folds="0") == ((0, 1), ())
    with pytest.raises(Refusal, match="exists with runs without seeds, which it would lose"):
        saved(seeds="5-5", folds="0")
    assert saved(seeds="5-5", folds="0", replace=True) == ((0,), (5,))
    write(tmp_path / "mine.yaml", [0], margin=0.5)
    assert saved(seeds="2-2", folds="2-2") == ((0, 2), (2, 5)), "also if something else has changed"
    with pytest.raises(Refusal, match="exists with runs with seed 2, with seed 5, which it would lose"):
        saved()
    write(tmp_path / "mine.yaml", [1], seeds=[5])
    assert saved() == ((0, 1, 2), (2, 5)), "without options, the file adds, too"
    assert set(records) == {studies / "mine" / "splits.json"}, "each has compared the splits"


def test_other_study_of_the_same_name_is_not_overwritten(
    command: Callable[..., str], studies: Path, tmp_path: Path
) -> None:
    saved = studies / "mine" / "study.yaml"
    write(saved, [0])
    before = saved.read_bytes()
    other = {"datasets": "Dataset501_Mine", "trainers": TRAINERS[1:], "configurations": "2d"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(other))
    said = command("run", "mine.yaml", status=1)
    lost = f"exists with trainers {TRAINERS[0]} and configurations 3d_fullres, which it would lose"
    assert f"study mine {lost}; choose another --name, or --replace" in said
    assert saved.read_bytes() == before


def test_study_needs_no_file(command: Callable[..., str]) -> None:
    given = ("--trainers", ",".join(TRAINERS), "-d", "501", "--seeds", "1-3")
    assert "Study study: 0 of 30 done" in command("status", *given, "--once")
    assert "expected STUDY, or --trainers" in command("status", status=2)


def test_options_may_be_spelled_as_those_of_nnunet(command: Callable[..., str], tmp_path: Path) -> None:
    given = ("-tr", ",".join(TRAINERS), "-d", "501", "-f", "1")
    assert "Study study: 0 of 2 done" in command("status", *given, "--once")
    write(tmp_path / "mine.yaml", [0])
    said = command("run", "mine.yaml", "-device", "cpu", "-num_gpus", "2", status=1)
    assert "-num_gpus: expected --gpus 2" in said


def test_file_with_blanks_needs_a_name(command: Callable[..., str], tmp_path: Path) -> None:
    write(tmp_path / "Meine Studie.yaml", [0])
    said = command("status", "Meine Studie.yaml", "--once", status=1)
    assert said.endswith("got 'Meine Studie'; choose one with --name\n")
    assert "Study mine: 0 of 2" in command("status", "Meine Studie.yaml", "--once", "--name", "mine")


def test_report_in_a_read_only_folder_names_the_option(
    command: Callable[..., str], studies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(studies / "mine" / "study.yaml", [0])

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", f"{arguments[4]}/figures")

    monkeypatch.setattr("nnunet_cpr.reports.write_report", refuse)
    said = command("report", "mine", status=1)
    assert said.endswith("mine/report: Permission denied; choose another folder with -o\n")


def test_study_is_removed_without_its_results(
    command: Callable[..., str], studies: Path, tmp_path: Path
) -> None:
    write(studies / "mine" / "study.yaml", [0])
    fold = next(load(str(studies / "mine" / "study.yaml")).runs()).folder(studies.parent)
    fold.mkdir(parents=True)
    assert "the results of its runs are kept" in command("remove", "mine")
    assert not (studies / "mine").exists() and fold.is_dir()
    assert "study 'mine'" in command("remove", "mine", status=1)


def test_status_is_printed_as_json(command: Callable[..., str], studies: Path) -> None:
    write(studies / "mine" / "study.yaml", [0, 1])
    found = json.loads(command("status", "mine", "--json"))
    assert [(run["trainer"], run["fold"], run["stage"]) for run in found] == [
        *((trainer, 0, "waiting") for trainer in TRAINERS),
        *((trainer, 1, "waiting") for trainer in TRAINERS),
    ]
