"""Arbitrary input gives a result or one clear line: no traceback, no hang, no incomplete file.

The properties are in ``tests/helpers/promises.py``, which the coverage-guided fuzz tests share.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from nnunet_cpr._files import read_json
from nnunet_cpr.datasets.archive import PrepareError
from nnunet_cpr.datasets.checks import read_nifti
from nnunet_cpr.datasets.registry import DATA_SETS
from nnunet_cpr.names import trainer_name as trainers
from nnunet_cpr.nnunet.fold_files import RESOURCES
from nnunet_cpr.reports.results import read_results
from nnunet_cpr.studies.definition import Run, Study, StudyError, TrainerEntry, load
from nnunet_cpr.studies.preparation import dataset_name
from nnunet_cpr.studies.resource_usage import ResourceUsage
from nnunet_cpr.studies.run_state import Stage, StudyPaths, is_running, state_of
from nnunet_cpr.studies.status import states, status_table
from tests.helpers import ROOT, archives, promises
from tests.helpers.examples import examples

DEEP = "[" * 100_000

# Names

FAMILY = st.sampled_from(
    [*trainers.FAMILIES, "AdamCPR", "SGDCPR", "AdamW", "SGD", "AMOS", "nnUNetTrainer"]
)
WORD = st.sampled_from([s.before for s in trainers.SUFFIXES] + [s.after for s in trainers.SUFFIXES])
NUMBER = st.sampled_from(["", "0", "1", "200", "1en3", "0p5", "1e999", "1e-3", "2k", "9" * 30, "٣", "²"])
TOKEN = st.builds("_{}{}{}".format, WORD, NUMBER, WORD | st.just("") | st.text(max_size=3))


@examples(300, search=3000)
@given(
    st.text(max_size=300) | st.builds(lambda f, ts: f + "".join(ts), FAMILY, st.lists(TOKEN, max_size=5))
)
def test_any_name_is_parsed_or_refused(text: str) -> None:
    promises.name_is_read_or_refused(text)


# Studies

SCALAR = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.binary(max_size=5)
    | st.sampled_from(["..", "../x", "-x", "a\nb", "\0", "\ud800", "x" * 300, "Dataset001_A", 2**200])
)
ANYTHING = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALAR, inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries({"trainer": st.just("A") | st.just("B") | ANYTHING}).flatmap(
    lambda entry: st.builds(
        lambda more: {**entry, **more},
        st.dictionaries(st.sampled_from(["label", "group", "published", "x"]), ANYTHING, max_size=3),
    )
)
DOCUMENT = st.fixed_dictionaries(
    {"trainers": st.lists(ENTRY | st.sampled_from(["A", "C"]), max_size=3) | ANYTHING},
    optional={
        key: st.just(good) | ANYTHING
        for key, good in {
            "name": "mine", "datasets": ["Dataset001_A"], "folds": [0, 1], "plans": "nnUNetPlans",
            "configurations": "2d", "reference": "A", "source": "a paper",
        }.items()
    },
)  # fmt: skip


def dumped(document: Any) -> bytes:
    import yaml

    return yaml.safe_dump(document).encode(errors="surrogatepass")


@examples(100, search=1000)
@given(document=DOCUMENT)
def test_any_document_is_loaded_or_refused(document: Any, tmp_path: Path) -> None:
    promises.study_file_is_read_or_refused(dumped(document), tmp_path)


@examples(100, search=1000)
@given(
    content=st.binary(max_size=60)
    | st.text(alphabet="&*!<>{}[]:-?|,#'\"\t\n ab0%@`", max_size=60).map(str.encode)
)
def test_any_bytes_are_loaded_or_refused(content: bytes, tmp_path: Path) -> None:
    promises.study_file_is_read_or_refused(content, tmp_path)
    promises.study_file_is_read_or_refused(b"trainers: [A]\nlabel: " + content, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainers: [A]\nfolds: [0]\nfolds: [1]", "duplicate key 'folds'"),
        ("trainers: [{trainer: A, label: x, label: y}]", "duplicate key 'label'"),
        ("trainers: !!python/object/apply:os.mkdir [PWNED]", "could not determine a constructor"),
        ("trainers: " + DEEP, "expected YAML"),
        ("trainers: [A]\nfolds: " + "9" * 10_000, "expected YAML"),
        ("trainers: [A]\nfolds: [0x" + "f" * 4000 + "]", "got a number of thousands of digits"),
        ("trainers: [A]\nfolds: [2020-13-45]", "expected YAML"),
        ("trainers: !!bool maybe", "expected YAML"),
        ("trainers: [A]\nreference: " + "f" * 10_000, "reference: expected one of the trainers"),
        ("trainers: [A]\nname: ..", "name: expected a name of"),
        ("trainers: [A]\ndatasets: ../../elsewhere", "datasets[0]: expected a name of"),
        ("trainers: [A]\ndatasets: -h", "datasets[0]: expected a name of"),
        ("trainers: [A]\nplans: [/etc]", "plans[0]: expected a name of"),
        ("trainers: [{trainer: A, label: [x]}]", "trainers[0].label: expected a valid string"),
        ('trainers: [{trainer: A, label: "\\ud800"}]', "trainers[0].label: expected printable text"),
        ("trainers: [{trainer: ~}]", "trainers[0].trainer: expected a valid string"),
        ("trainers: [{trainer: A, published: {B: .inf}}]", "published.B: expected a number less than"),
        ("trainers: [{trainer: A, published: [[1, 2]]}]", "published: expected a valid dict"),
        (b"trainers: [\xff]", "expected YAML"),
        (b"\xff\xfet\0r\0", "expected"),
        (b"", "expected a mapping"),
        (b"\0", "expected YAML"),
    ],
)  # fmt: skip
def test_invalid_study_file_is_refused(
    content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StudyError, match=re.escape(message)) as caught:
        load("mine.yaml")
    promises.assert_one_line(caught.value)
    assert os.listdir() == ["mine.yaml"]


def test_folder_is_refused_as_study(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="expected a file or a preset"):
        load(str(tmp_path))


def test_label_of_two_lines_becomes_one(tmp_path: Path) -> None:
    content = b"trainers: [{trainer: A, label: 'one\n\n  two'}]\nsource: |\n  a\n  paper\n"
    study = promises.study_file_is_read_or_refused(content, tmp_path)
    assert study is not None and study.trainers[0].label == "one two" and study.source == "a paper"


@pytest.mark.parametrize("given", ["²", "9" * 5000, "٣"])
def test_only_ascii_digits_are_data_set_numbers(given: str, tmp_path: Path) -> None:
    folders = {name: str(tmp_path) for name in ("nnUNet_raw", "nnUNet_preprocessed")}
    assert dataset_name(given, folders) == given  # a name that no data set has


# Files of trainings


@examples(100, search=1000)
@given(
    content=st.binary(max_size=100)
    | st.lists(
        st.sampled_from(
            [
                "\n2026-01-01 10:00:00.0: ",
                "Epoch ",
                "Epoch time: ",
                " s",
                "train_loss ",
                "Pseudo dice [",
                "nan",
            ]
            + ["inf", "1e999", "-1e308", "9" * 5000, "0.5", "٣", "], ", "3"]
        ),
        max_size=30,
    ).map(lambda words: "".join(words).encode())
)
def test_any_training_log_is_read(content: bytes, tmp_path: Path) -> None:
    promises.log_is_read(content, tmp_path)


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


@examples(40, search=300)
@given(
    summary=torn_or_mutated(SUMMARY),
    resources=torn_or_mutated(SEEN),
    running=torn_or_mutated(RUNNING),
    labels=torn_or_mutated(LABELS),
    history=st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            [
                "epoch,step,parameter,measure,kappa,multiplier",
                "0,1,a,1,1,1",
                "inf,1,a,1,1,1",
                "1e30,1,1,1,1,1",
            ]
            + ["0.5,1,b,1,1,1", "nan,,,,,", "0,1,7,inf,inf,-inf", '"', ",,,,,,,,", "\0"]
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
        promises.assert_one_line(note)


# As JSON; Python reads the first four as floats.
NOT_FINITE = ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400]


@pytest.mark.parametrize("number", [*NOT_FINITE, "-1", "true", '"1"', "null"], ids=lambda n: n[:9])
@pytest.mark.parametrize("key", SEEN)
def test_unusable_resources_count_as_missing(key: str, number: str, tmp_path: Path) -> None:
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
    assert (added["peak_memory_bytes"] == 2**60) == ("peak_memory_bytes" in kept)
    assert added["peak_gpu_memory_bytes"] == kept.get("peak_gpu_memory_bytes")
    assert all(value is None or math.isfinite(value) for value in added.values())


@pytest.mark.parametrize("number", [n for n in NOT_FINITE if n != "NaN"], ids=lambda n: n[:9])
def test_infinite_dice_leaves_a_fold_unfinished(number: str, tmp_path: Path) -> None:
    study = Study("s", [RUN.dataset], [TrainerEntry("A")], "A", folds=(0, 1))
    paths = StudyPaths(tmp_path, tmp_path / "s")
    for run, dice in zip(study.runs(), (number, "0.5")):
        finish(run, dice, tmp_path)
    damaged, good = study.runs()
    assert state_of(damaged, paths).stage is Stage.WAITING
    assert state_of(good, paths).stage is Stage.DONE
    found = read_results(study, tmp_path)
    assert set(found.cases["fold"]) == {1} and "summary.json unreadable" in found.notes[0]


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


@pytest.mark.parametrize("pid", [0, -1, 2**70, "x", None, [1], 1e400])
def test_invalid_process_number_is_not_running(pid: Any, tmp_path: Path) -> None:
    """0 and -1 are process groups, which always exist."""
    folder = RUN.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / ".study_running.json").write_text(json.dumps({**RUNNING, "pid": pid}))
    assert not is_running(RUN, StudyPaths(tmp_path, tmp_path / "s"))


# Archives


@pytest.fixture(scope="module")
def nifti(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("nifti") / "a.nii"
    archives.write(file, archives.labels(0, (0, 1)))
    return file.read_bytes()


FIELDS = [0, 40, 42, 44, 46, 48, 70, 72, 76, 80, 84, 88, 108, 112, 116, 252, 254, 256, 280, 344]
WORDS = [b"\xff" * 4, b"\0" * 4, b"\x7f" * 4, b"\xff\x7f\xff\x7f", b"\0\0\x80\x7f", b"\0\0\xc0\x7f"]


@examples(150, search=1000)
@given(
    edits=st.lists(
        st.tuples(
            st.sampled_from(FIELDS) | st.integers(0, 351), st.sampled_from(WORDS) | st.binary(max_size=4)
        ),
        max_size=5,
    ),
    length=st.none() | st.integers(0, 400),
    compressed=st.booleans(),
)
def test_any_image_is_read_or_refused(
    edits: list[tuple[int, bytes]], length: int | None, compressed: bool, nifti: bytes, tmp_path: Path
) -> None:
    content = bytearray(nifti)
    for place, word in edits:
        content[place : place + len(word)] = word
    content = content[:length]
    file = tmp_path / ("a.nii.gz" if compressed else "a.nii")
    file.write_bytes(gzip.compress(content, 1) if compressed else content)
    try:
        read_nifti(file)
    except PrepareError as error:
        promises.assert_one_line(error)


DESCRIPTION = {
    "labels": {"0": "background", "1": "organ"},
    "modality": {"0": "CT"},
    "numTraining": 1,
    "training": [{"image": "./imagesTr/amos_0001.nii.gz", "label": "./labelsTr/amos_0001.nii.gz"}],
    "validation": [{"image": "../../outside/amos_0002.nii.gz"}, {"image": "/etc/amos_0003.nii.gz"}],
    "test": ["amos_" + "9" * 5000 + ".nii.gz"],
}


@examples(60, search=500)
@given(content=torn_or_mutated(DESCRIPTION))
def test_any_dataset_json_stays_in_its_folder(content: bytes, tmp_path: Path) -> None:
    for part in ("imagesTr", "labelsTr", "imagesVa", "labelsVa", "imagesTs"):
        (tmp_path / part).mkdir(exist_ok=True)
    (tmp_path / "dataset.json").write_bytes(content)
    try:
        archive = DATA_SETS["amos22"].open(tmp_path)
    except PrepareError:
        return
    for case in archive.cases:
        for path in (*case.images, *([case.label] if case.label else [])):
            assert path.parent.parent == tmp_path


# Coverage-guided


@pytest.mark.release
@pytest.mark.parametrize("harness", ["names", "study_file", "training_log"])
def test_short_fuzzing_finds_no_error(harness: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed")
    fuzzer = [sys.executable, "-m", f"tests.fuzz.fuzz_{harness}", "-max_total_time=15", "-timeout=30"]
    # libFuzzer limits the peak of its memory, and a process inherits the peak of the one that started
    # it. A worker of pytest can be larger than the limit; a shell is small.
    command = ["sh", "-c", '"$@"; exit $?', "sh", *fuzzer]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stderr[-5000:]
    tried = re.search(r"Done (\d+) runs", done.stderr)
    assert tried is not None and int(tried[1]) > 100, done.stderr[-2000:]
