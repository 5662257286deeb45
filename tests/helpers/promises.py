"""Properties that hold for any input; hypothesis and atheris search for counterexamples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nnunet_cpr.bounds import Bound, as_bound
from nnunet_cpr.names import WrongName
from nnunet_cpr.names import run_name as runs
from nnunet_cpr.names import trainer_name as trainers
from nnunet_cpr.nnunet.fold_files import LOG_COLUMNS, read_logs
from nnunet_cpr.studies.definition import Study, StudyError, load, save


def assert_one_line(error: BaseException | str) -> None:
    message = str(error)
    assert message and len(message.splitlines()) == 1, message
    assert len(message) < 2000, message


def name_is_read_or_refused(text: str) -> None:
    """Check that a name of a trainer, run or bound is parsed, not ours, or refused in one line."""
    for parse in (trainers.parse_trainer_name, runs.parse_run_name):
        try:
            name = parse(text)
        except WrongName as error:
            assert_one_line(error)
            continue
        if name is None:
            assert parse is trainers.parse_trainer_name
            continue
        printed = str(name)
        assert parse(printed) == name and str(parse(printed)) == printed
    try:
        bound = as_bound(text)
    except WrongName as error:
        assert_one_line(error)
        return
    assert isinstance(bound, Bound)
    printed = str(runs.RunName("AdamCPR", kappa=bound)).removeprefix("AdamCPR_")
    assert as_bound(printed) == bound


def study_file_is_read_or_refused(content: bytes, folder: Path) -> Study | None:
    """Check that a study is loaded, and unchanged after saving, or refused in one line."""
    file = folder / "given.yaml"
    file.write_bytes(content)
    try:
        study = load(str(file))
    except StudyError as error:
        assert_one_line(error)
        return None
    save(study, folder / "again.yaml")
    assert load(str(folder / "again.yaml")) == study
    for run in study.runs():
        assert run.folder(folder).resolve().is_relative_to(folder.resolve())
        break
    return study


def log_is_read(content: bytes, fold: Path) -> None:
    """Check that the table of a training log has its columns with numbers or NaN."""
    (fold / "training_log_2026_1_1_00_00_00.txt").write_bytes(content)
    table = read_logs(fold)
    assert list(table) == LOG_COLUMNS
    numbers = table[LOG_COLUMNS[1:]].to_numpy()
    assert numbers.dtype == float and not np.isinf(numbers).any()
    assert table["epoch"].is_unique and table["epoch"].between(0, 10**9).all()
