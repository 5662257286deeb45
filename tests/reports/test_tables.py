import io
import shutil
import subprocess

import pandas as pd
import pytest
from rich.console import Console

from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.results import Setting, read_results
from nnunet_cpr.reports.tables import (
    class_table,
    latex,
    layout,
    layout_notes,
    main_table,
    markdown,
    print_table,
    time_table,
)
from nnunet_cpr.studies.definition import TrainerEntry
from tests.helpers.report_folds import (
    DATASET,
    LABELS,
    both,
    study,
    whole,
    write_fold,
    write_json,
    write_log,
)

SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")
WD = TrainerEntry("A", "1e-5", "weight_decay", {DATASET: 80.0})
CPR = TrainerEntry("B", "1k", "CPR, Kappa-WS", {DATASET: 81.5})


def read(planned, results):
    return read_results(planned, results, None, None)


@pytest.fixture
def unfinished(tmp_path):
    """Make results in which A has folds 0 and 1 and B fold 0 only."""
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    write_fold(tmp_path, "A", 1, {"b": both(0.8)})
    write_fold(tmp_path, "B", 0, {"a": both(0.72)})
    return read(study(WD, CPR, source="Somebody et al., table 1"), tmp_path)


def lines(results):
    return layout(results, main_table(results)).lines


def test_main_table_has_mean_and_deviation(unfinished):
    table = main_table(unfinished)
    a = table.iloc[0]
    assert a["dice_percent"] == pytest.approx(75)
    assert a["deviation_points"] == pytest.approx(10 / 2**0.5)  # n - 1: (5^2 + 5^2) / 1
    assert (a["kind"], a["folds"], a["folds_planned"]) == ("own folds", "0 1", 2)


def test_unfinished_folds_are_marked_and_not_compared(unfinished):
    own, common, published = lines(unfinished)
    assert [v.text for v in own.values] == ["75.00", "72.00"]
    assert own.values[0].below == ("± 7.07",) and own.values[1].below == ("1 of 2 folds",)
    assert not any(v.best for v in own.values)
    assert common.title == "common folds (0)"
    assert [(v.text, v.best) for v in common.values] == [("70.00", False), ("72.00", True)]
    assert published.title == "published"
    assert [(v.text, v.best) for v in published.values] == [("80.00", False), ("81.50", True)]
    notes = layout_notes(unfinished)
    assert any("Somebody et al., table 1" in n for n in notes)
    assert any("Not all folds" in n for n in notes)


def test_best_compares_rounded_values(tmp_path):
    for trainer, dice in (("A", 0.80001), ("B", 0.80002), ("C", 0.7)):
        for fold in (0, 1):
            write_fold(tmp_path, trainer, fold, {f"a{fold}": both(dice)})
    (line,) = lines(read(study("A", "B", "C"), tmp_path))
    assert [v.best for v in line.values] == [True, True, False]


def test_single_trainer_is_not_best(tmp_path):
    write_fold(tmp_path, "B", 0, {"a": both(0.8)})
    (line,) = lines(read(study("A", "B"), tmp_path))
    assert [(v.text, v.below, v.best) for v in line.values] == [
        ("-", ("0 of 2 folds",), False),
        ("80.00", ("1 of 2 folds",), False),
    ]


def test_no_common_fold_gives_no_common_line(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.8)})
    write_fold(tmp_path, "B", 1, {"b": both(0.9)})
    (line,) = lines(read(study("A", "B"), tmp_path))
    assert not any(v.best for v in line.values)


def test_several_configurations_are_named(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.8)}, configuration="2d")
    planned = study(WD, configurations=("2d", "3d_fullres"))
    first, second, published = lines(read(planned, tmp_path))
    assert first.title == f"{DATASET}, 2d" and second.title == f"{DATASET}, 3d_fullres"
    assert second.values[0].text == "-" and published.values[0].text == "80.00"


def test_latex_escapes_groups_and_marks_the_best(unfinished):
    text = latex(layout(unfinished, main_table(unfinished)), layout_notes(unfinished))
    assert r"Dataset001\_Toy & 75.00 & 72.00 \\" in text
    assert r"& \multicolumn{1}{c}{weight\_decay} & \multicolumn{1}{c}{CPR, Kappa-WS} \\" in text
    assert r"\cmidrule(lr){2-2} \cmidrule(lr){3-3}" in text
    assert r"common folds (0) & 70.00 & \textbf{72.00} \\" in text
    assert r"published & 80.00 & \textbf{81.50} \\" in text
    assert r"{\scriptsize $\pm$ 7.07} & {\scriptsize 1 of 2 folds} \\" in text
    assert "Somebody et al., table 1" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX (pdflatex) is not installed")
def test_latex_compiles_alone_and_as_input(tmp_path):
    hard = TrainerEntry("A", r"50 % & #1 \x ~^ {a_b} [c] <d> $e", "[x]", {DATASET: 1.0})
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    results = read(study(hard, "B", source="100 % & more_"), tmp_path)
    text = latex(layout(results, main_table(results)), layout_notes(results))
    (tmp_path / "report.tex").write_text(text)
    (tmp_path / "outer.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs}\begin{document}"
        r"\begin{table}\input{report}\caption{It}\end{table}\end{document}"
    )
    for name in ("report", "outer"):
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:]
        assert "(1 page" in done.stdout


def test_markdown_table_has_groups_and_best(unfinished):
    text = markdown(layout(unfinished, main_table(unfinished)))
    header, rule, own, common, _ = text.splitlines()
    assert header == r"| data set | weight\_decay<br>1e-5 | CPR, Kappa-WS<br>1k |"
    assert rule == "| --- | ---: | ---: |"
    assert own == r"| Dataset001\_Toy | 75.00<br>± 7.07 | 72.00<br>1 of 2 folds |"
    assert common.endswith("| 70.00 | **72.00** |")


@pytest.mark.parametrize("width", [100, 60])
def test_narrow_terminal_gets_transposed_table(tmp_path, width):
    for trainer in "ABCD":
        write_fold(tmp_path, trainer, 0, {"a": both(0.72)})
    results = read(study(*"ABCD"), tmp_path)
    console = Console(file=io.StringIO(), width=width)
    print_table(layout(results, main_table(results)), "[toy]", console)
    text = console.file.getvalue()
    assert "[toy]" in text
    assert ("│ trainer" in text or "┃ trainer" in text) == (width == 60)
    assert "72.00" in text and "1 of 2 folds" in text


def test_class_table_averages_over_folds(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": {"1": 0.2, "2": 0.4}, "b": {"1": 0.4, "2": 0.4}})
    write_fold(tmp_path, "A", 1, {"c": {"1": 0.5, "2": float("nan")}})
    table = class_table(read(study("A", "B"), tmp_path), SETTING)
    assert table.columns == ("A",)
    # liver: (0.3 + 0.5) / 2; the kidney is in fold 0 alone.
    assert [(line.title, line.values[0].text) for line in table.lines] == [
        ("liver", "40.00"),
        ("left_kidney", "40.00"),
    ]


def test_time_table_has_medians_and_sums(tmp_path):
    for fold, seconds in ((0, (100.0, 10.0, 10.0)), (1, (20.0, 20.0, 20.0))):
        folder = write_fold(tmp_path, "A", fold, {f"a{fold}": both(0.5)})
        write_log(folder, {e: (0, 0, 0, s) for e, s in enumerate(seconds)})
        content = {
            "seconds": 7200,
            "peak_memory_bytes": (fold + 1) * 2**30,
            "peak_gpu_memory_bytes": None,
        }
        write_json(folder / "resources.json", content)
    first, second = time_table(read(study("A", "B"), tmp_path), SETTING).lines
    assert [v.text for v in first.values] == ["20.0 s", "1.5 min", "2.0 h", "2.0 GiB", "not recorded"]
    assert [v.text for v in second.values] == ["not recorded"] * 5


def test_all_files_have_the_same_results(tmp_path):
    planned = study("nnUNetTrainerSGD", "nnUNetTrainerCPR")
    folders = whole(tmp_path, planned)
    console = Console(file=io.StringIO(), width=100)
    files = write_report(planned, *folders, tmp_path / "report", console)
    assert sorted(f.name for f in files) == [
        "cases.csv", "comparisons.csv", "report.html", "report.md", "report.tex", "table.csv",
    ]  # fmt: skip
    assert sorted((tmp_path / "report").iterdir()) == sorted(files)
    cases = pd.read_csv(tmp_path / "report" / "cases.csv")
    assert list(cases.columns) == [
        "dataset", "configuration", "plans", "fold", "case", "class", "trainer", "dice",
    ]  # fmt: skip
    assert len(cases) == 2 * 8 * 2 * len(LABELS) - 2 * 8 * 2
    table = pd.read_csv(tmp_path / "report" / "table.csv")
    by_hand = cases[cases["trainer"] == "nnUNetTrainerCPR"].groupby(["fold", "class"])["dice"].mean()
    mean = 100 * by_hand.groupby("fold").mean().mean()
    assert table.loc[1, "dice_percent"] == pytest.approx(mean)
    sentence = pd.read_csv(tmp_path / "report" / "comparisons.csv").loc[0, "sentence"]
    for text in (console.file.getvalue(), (tmp_path / "report" / "report.md").read_text()):
        assert " ".join(sentence.split()) in " ".join(text.split())
        assert f"{mean:.2f}" in text


def test_equal_results_give_equal_bytes(tmp_path):
    planned = study("nnUNetTrainerSGD", "nnUNetTrainerCPR")
    folders = whole(tmp_path, planned)
    texts = []
    for name in ("one", "two"):
        files = write_report(planned, *folders, tmp_path / name, Console(file=io.StringIO()))
        texts.append({f.name: f.read_bytes() for f in files})
    assert texts[0] == texts[1]
