"""Arbitrary input gives a result or one clear line: no traceback, no hang, no incomplete file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr.cpr.bounds import Bound, as_bound
from nnunet_cpr.names import WrongName
from nnunet_cpr.names import run_name as runs
from nnunet_cpr.names import trainer_name as trainers
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.suffixes import SUFFIXES
from nnunet_cpr.nnunet.fold_files import RESOURCES
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.studies.state import StudyPaths
from nnunet_cpr.studies.status import states, status_table
from nnunet_cpr.studies.study import Run, Study, TrainerEntry
from nnunet_cpr.studies.study_file import load
from tests.helpers.examples import examples

DEEP = "[" * 10_000

# Properties that hold for any input


def assert_one_line(error: BaseException | str) -> None:
    message = str(error)
    assert message and len(message.splitlines()) == 1, message
    assert len(message) < 2000, message


# Names

FAMILY = st.sampled_from([*FAMILIES, "AdamCPR", "SGDCPR", "AdamW", "SGD", "AMOS", "nnUNetTrainer"])
WORD = st.sampled_from([s.before for s in SUFFIXES] + [s.after for s in SUFFIXES])
NUMBER = st.sampled_from(["", "0", "1", "200", "1en3", "0p5", "1e999", "1e-3", "2k", "9" * 30, "٣", "²"])
TOKEN = st.builds("_{}{}{}".format, WORD, NUMBER, WORD | st.just("") | st.text(max_size=3))


@examples(100, search=3000)
@given(
    st.text(max_size=300) | st.builds(lambda f, ts: f + "".join(ts), FAMILY, st.lists(TOKEN, max_size=5))
)
def test_any_name_is_parsed_or_refused(text: str) -> None:
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


# Studies


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainers: [A]\nfolds: [0]\nfolds: [1]", "duplicate key 'folds'"),
        ("trainers: !!python/object/apply:os.mkdir [PWNED]", "could not determine a constructor"),
        ("trainers: " + DEEP, "expected YAML"),
        ("trainers: [A]\ndatasets: ../../elsewhere", "datasets[0]: expected a name of"),
        (b"trainers: [\xff]", "expected YAML"),
    ],
)  # fmt: skip
def test_invalid_study_file_is_refused(
    content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Refusal, match=re.escape(message)) as caught:
        load("mine.yaml")
    assert_one_line(caught.value)
    assert os.listdir() == ["mine.yaml"]


# Files of trainings


RUN = Run("Dataset001_A", "3d_fullres", "nnUNetPlans", 0, "A")
STUDY = Study("s", [RUN.dataset], [TrainerEntry("A"), TrainerEntry("B")], "A", folds=(0, 1))


def torn(document: Any) -> st.SearchStrategy[bytes]:
    """Return JSON files that are truncated, not JSON, or have a wrong value in one place."""
    whole = json.dumps(document)
    values = st.sampled_from(["null", "[]", "{}", "-1", "NaN", "1" + "0" * 400, '"a\\nb"', '"\\ud800"'])
    places = [match.span() for match in re.finditer(r'null|[\d.]+|"[^"]*"(?!:)', whole)]
    changed = st.builds(
        lambda at, new: whole[: at[0]] + new + whole[at[1] :], st.sampled_from(places), values
    )
    cut = st.integers(0, len(whole)).map(lambda n: whole[:n])
    return (changed | cut | values | st.just(DEEP)).map(str.encode) | st.binary(max_size=60)


CASE = {"prediction_file": "/a/case_1.nii.gz", "metrics": {"1": {"Dice": 0.5}, "(1, 2)": {"Dice": 0.25}}}
SUMMARY = {
    "foreground_mean": {"Dice": 0.5},
    "metric_per_case": [CASE, {**CASE, "prediction_file": "/a/case_2.nii.gz"}],
}
SEEN = {"seconds": 12.5, "peak_memory_bytes": 10, "peak_gpu_memory_bytes": None}
RUNNING = {"host": os.uname().nodename, "pid": 1, "trainer": "A"}
LABELS = {"labels": {"background": 0, "liver": 1, "both": [1, 2]}, "file_ending": ".nii.gz"}


LOG = ["\n2026-01-01 10:00:00.0: ", "Epoch ", "Epoch time: ", " s", "train_loss ", "Pseudo dice ["] + [
    *("nan", "inf", "1e999", "9" * 5000, "0.5", "٣", "], ", "3")
]
FILES = {
    "validation/summary.json": torn(SUMMARY),
    RESOURCES: torn(SEEN),
    ".study_running.json": torn(RUNNING),
    "../dataset.json": torn(LABELS),
    "cpr_history.csv": st.binary(max_size=200),
    "training_log_2026_1_1_00_00_00.txt": st.binary(max_size=100)
    | st.lists(st.sampled_from(LOG), max_size=30).map(lambda words: "".join(words).encode()),
}


@examples(40, search=300)
@given(files=st.fixed_dictionaries(FILES))
def test_damaged_fold_stops_neither_status_nor_report(files: dict[str, bytes], tmp_path: Path) -> None:
    fold = RUN.folder(tmp_path)
    good = Run(RUN.dataset, RUN.configuration, RUN.plans, 0, "B").folder(tmp_path)
    for folder in (fold, good):
        (folder / "validation").mkdir(parents=True, exist_ok=True)
    (good / "validation" / "summary.json").write_text(json.dumps(SUMMARY))
    for name, content in files.items():
        (fold / name).write_bytes(content)

    paths = StudyPaths(tmp_path, tmp_path / "studies" / "s")
    status_table(STUDY, states(STUDY, paths))
    found = read_results(STUDY, tmp_path)
    dice = found.cases["dice"].dropna()
    assert dice.between(0, 1).all()
    assert not found.cases[["fold", "trainer", "case", "class"]].duplicated().any()
    for name in [*found.cases["case"], *found.cases["class"]]:
        name.encode()  # a report can write every name
    for note in found.notes:
        assert_one_line(note)
