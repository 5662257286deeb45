"""Arbitrary input gives a result or one clear line: no traceback, no hang, no incomplete file."""

from __future__ import annotations

import io
import json
import math
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from nnunet_cpr._files import read_json
from nnunet_cpr.bounds import Bound, as_bound
from nnunet_cpr.names import WrongName
from nnunet_cpr.names import run_name as runs
from nnunet_cpr.names import trainer_name as trainers
from nnunet_cpr.nnunet.fold_files import LOG_COLUMNS, RESOURCES, read_logs
from nnunet_cpr.reports.results import read_results
from nnunet_cpr.studies.definition import Run, Study, StudyError, TrainerEntry, load, save
from nnunet_cpr.studies.preparation import dataset_name
from nnunet_cpr.studies.resource_usage import ResourceUsage
from nnunet_cpr.studies.run_state import Stage, StudyPaths, state_of
from nnunet_cpr.studies.status import states, status_table
from tests.helpers.examples import examples

DEEP = "[" * 10_000

# Properties that hold for any input


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


# Names

FAMILY = st.sampled_from(
    [*trainers.FAMILIES, "AdamCPR", "SGDCPR", "AdamW", "SGD", "AMOS", "nnUNetTrainer"]
)
WORD = st.sampled_from([s.before for s in trainers.SUFFIXES] + [s.after for s in trainers.SUFFIXES])
NUMBER = st.sampled_from(["", "0", "1", "200", "1en3", "0p5", "1e999", "1e-3", "2k", "9" * 30, "٣", "²"])
TOKEN = st.builds("_{}{}{}".format, WORD, NUMBER, WORD | st.just("") | st.text(max_size=3))


@examples(150, search=3000)
@given(
    st.text(max_size=300) | st.builds(lambda f, ts: f + "".join(ts), FAMILY, st.lists(TOKEN, max_size=5))
)
def test_any_name_is_parsed_or_refused(text: str) -> None:
    name_is_read_or_refused(text)


# Studies

SCALAR = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.sampled_from(["..", "../x", "-x", "a\nb", "\0", "\ud800", "x" * 300, "Dataset001_A", 2**200])
)
ANYTHING = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALAR, inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {"trainer": st.sampled_from(["A", "B"]) | ANYTHING},
    optional=dict.fromkeys(["label", "group", "published", "x"], ANYTHING),
)
GOOD_STUDY = {
    "name": "mine", "datasets": ["Dataset001_A"], "folds": [0, 1], "plans": "nnUNetPlans",
    "configurations": "2d", "reference": "A", "source": "a paper",
}  # fmt: skip
DOCUMENT = st.fixed_dictionaries(
    {"trainers": st.lists(ENTRY | st.sampled_from(["A", "C"]), max_size=3) | ANYTHING},
    optional={key: st.just(good) | ANYTHING for key, good in GOOD_STUDY.items()},
)


@examples(150, search=2000)
@given(
    content=st.binary(max_size=60)
    | st.text(alphabet="&*!<>{}[]:-?|,#'\"\t\n ab0%@`", max_size=60).map(str.encode)
    | DOCUMENT.map(lambda document: yaml.safe_dump(document).encode(errors="surrogatepass"))
)
def test_any_study_file_is_loaded_or_refused(content: bytes, tmp_path: Path) -> None:
    study_file_is_read_or_refused(content, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainers: [A]\nfolds: [0]\nfolds: [1]", "duplicate key 'folds'"),
        ("trainers: !!python/object/apply:os.mkdir [PWNED]", "could not determine a constructor"),
        ("trainers: " + DEEP, "expected YAML"),
        ("trainers: [A]\nfolds: " + "9" * 10_000, "expected YAML"),
        ("trainers: [A]\nfolds: [0x" + "f" * 4000 + "]", "got a number of thousands of digits"),
        ("trainers: [A]\nreference: " + "f" * 10_000, "reference: expected one of the trainers"),
        ("trainers: [A]\ndatasets: ../../elsewhere", "datasets[0]: expected a name of"),
        ('trainers: [{trainer: A, label: "\\ud800"}]', "trainers[0].label: expected printable text"),
        ("trainers: [{trainer: A, published: {B: .inf}}]", "published.B: expected a number less than"),
        (b"trainers: [\xff]", "expected YAML"),
        (b"", "expected a mapping"),
    ],
)  # fmt: skip
def test_invalid_study_file_is_refused(
    content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StudyError, match=re.escape(message)) as caught:
        load("mine.yaml")
    assert_one_line(caught.value)
    assert os.listdir() == ["mine.yaml"]


def test_only_ascii_digits_are_data_set_numbers(tmp_path: Path) -> None:
    folders = {name: str(tmp_path) for name in ("nnUNet_raw", "nnUNet_preprocessed")}
    assert dataset_name("²", folders) == "²"  # a name that no data set has


# Files of trainings


@examples(100, search=1000)
@given(
    content=st.binary(max_size=100)
    | st.lists(
        st.sampled_from(
            ["\n2026-01-01 10:00:00.0: ", "Epoch ", "Epoch time: ", " s", "train_loss ", "Pseudo dice ["]
            + ["nan", "inf", "1e999", "9" * 5000, "0.5", "٣", "], ", "3"]
        ),
        max_size=30,
    ).map(lambda words: "".join(words).encode())
)
def test_any_training_log_is_read(content: bytes, tmp_path: Path) -> None:
    log_is_read(content, tmp_path)


RUN = Run("Dataset001_A", "3d_fullres", "nnUNetPlans", 0, "A")
STUDY = Study("s", [RUN.dataset], [TrainerEntry("A"), TrainerEntry("B")], "A", folds=(0, 1))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([math.nan, math.inf, -1, 0, 10**400, "", "a\nb", "\ud800", "1e5", 0.5, 2.0])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def torn_or_mutated(document: Any) -> st.SearchStrategy[bytes]:
    """Return JSON files that are changed in one place, truncated, or arbitrary."""

    def mutated(draw: st.DrawFn) -> bytes:
        copy = json.loads(json.dumps(document))
        paths = []

        def walk(node: Any) -> None:
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                paths.append((node, key))
                if isinstance(node[key], dict | list):
                    walk(node[key])

        walk(copy)
        node, key = draw(st.sampled_from(paths))
        if draw(st.integers(0, 4)) == 0:
            del node[key]
        elif isinstance(node, dict) and draw(st.integers(0, 4)) == 0:
            node[draw(st.text(max_size=5))] = node.pop(key)
        else:
            node[key] = draw(JSON)
        return json.dumps(copy).encode()

    whole = json.dumps(document).encode()
    cut = st.integers(0, len(whole)).map(lambda n: whole[:n])
    return (
        st.composite(mutated)()
        | cut
        | JSON.map(lambda j: json.dumps(j).encode())
        | st.just(DEEP.encode())
    )


CASE = {"prediction_file": "/a/case_1.nii.gz", "metrics": {"1": {"Dice": 0.5}, "(1, 2)": {"Dice": 0.25}}}
SUMMARY = {
    "foreground_mean": {"Dice": 0.5},
    "metric_per_case": [CASE, {**CASE, "prediction_file": "/a/case_2.nii.gz"}],
}
SEEN = {"seconds": 12.5, "peak_memory_bytes": 10, "peak_gpu_memory_bytes": None}
RUNNING = {"host": os.uname().nodename, "pid": 1, "trainer": "A"}
LABELS = {"labels": {"background": 0, "liver": 1, "both": [1, 2]}, "file_ending": ".nii.gz"}
GOOD = {
    "summary": json.dumps(SUMMARY).encode(),
    "running": json.dumps(RUNNING).encode(),
    "labels": json.dumps(LABELS).encode(),
    "history": b"",
}


@examples(25, search=300)
@given(
    summary=torn_or_mutated(SUMMARY),
    resources=torn_or_mutated(SEEN),
    running=torn_or_mutated(RUNNING),
    labels=torn_or_mutated(LABELS),
    history=st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            ["epoch,step,parameter,measure,kappa,multiplier", "0,1,a,1,1,1", "inf,1,a,1,1,1"]
            + ["1e30,1,1,1,1,1", "nan,,,,,", "0,1,7,inf,inf,-inf", '"', ",,,,,,,,", "\0"]
        ),
        max_size=5,
    ).map(lambda lines: "\n".join(lines).encode()),
)
@example(**GOOD, resources=b'{"seconds": NaN}')
@example(**GOOD, resources=json.dumps({**SEEN, "seconds": 10**400}).encode())
@example(
    **{**GOOD, "summary": json.dumps(SUMMARY).replace("0.25", "1" + "0" * 400).encode()},
    resources=json.dumps(SEEN).encode(),
)
def test_damaged_fold_stops_neither_status_nor_report(
    summary: bytes, resources: bytes, running: bytes, labels: bytes, history: bytes, tmp_path: Path
) -> None:
    fold = RUN.folder(tmp_path)
    good = Run(RUN.dataset, RUN.configuration, RUN.plans, 0, "B").folder(tmp_path)
    for folder in (fold, good):
        (folder / "validation").mkdir(parents=True, exist_ok=True)
    (good / "validation" / "summary.json").write_text(json.dumps(SUMMARY))
    (fold / "validation" / "summary.json").write_bytes(summary)
    (fold / RESOURCES).write_bytes(resources)
    (fold / ".study_running.json").write_bytes(running)
    (fold.parent / "dataset.json").write_bytes(labels)
    (fold / "cpr_history.csv").write_bytes(history)

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


def test_unusable_resources_count_as_missing(tmp_path: Path) -> None:
    key, number = "peak_memory_bytes", "1e999"
    fold = RUN.folder(tmp_path)
    (fold / "validation").mkdir(parents=True)
    (fold / "validation" / "summary.json").write_text(json.dumps(SUMMARY))
    seen = {"seconds": 12.5, "peak_memory_bytes": 2**60, "peak_gpu_memory_bytes": 2**60}
    content = json.dumps({**seen, key: "HERE"}).replace('"HERE"', number)
    (fold / RESOURCES).write_text(content)

    found = read_results(STUDY, tmp_path).resources.iloc[0]
    expected = {**seen, key: math.nan}
    np.testing.assert_array_equal(found[list(seen)].astype(float), list(expected.values()))

    ResourceUsage(fold).save()
    added = read_json(fold / RESOURCES)
    kept = {name: value for name, value in seen.items() if name != key}
    assert added["seconds"] >= kept.get("seconds", 0)
    assert added["peak_gpu_memory_bytes"] == kept.get("peak_gpu_memory_bytes")
    assert all(value is None or math.isfinite(value) for value in added.values())


def test_undefined_dice_is_missing_in_finished_fold(tmp_path: Path) -> None:
    """nnU-Net writes NaN for a class that is in neither the reference nor the prediction."""
    study = Study("s", [RUN.dataset], [TrainerEntry("A")], "A", folds=(0,))
    paths = StudyPaths(tmp_path, tmp_path / "s")
    finish(RUN, "NaN", tmp_path)
    assert state_of(RUN, paths).stage is Stage.DONE
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_table(study, states(study, paths)))
    assert "1 of 1 done" in (text := console.export_text()) and "nan" not in text
    assert read_results(study, tmp_path).cases["dice"].isna().all()


def finish(run: Run, dice: str, results: Path) -> None:
    """Write a fold that is trained and validated with this Dice."""
    fold = run.folder(results)
    (fold / "validation").mkdir(parents=True)
    with zipfile.ZipFile(fold / "checkpoint_final.pth", "w") as checkpoint:
        checkpoint.writestr("data.pkl", b"")
    cases = [{"prediction_file": "/a/case_1.nii.gz", "metrics": {"1": {"Dice": "HERE"}}}]
    summary = json.dumps({"foreground_mean": {"Dice": "HERE"}, "metric_per_case": cases})
    (fold / "validation" / "summary.json").write_text(summary.replace('"HERE"', dice))
