import io
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.renderers import latex, markdown, print_table
from nnunet_cpr.reports.results import Setting, read_results
from nnunet_cpr.reports.tables import class_table, layout, layout_notes, main_table, time_table
from nnunet_cpr.studies.definition import METRIC_NAMES, TrainerEntry
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


def columns(results):
    """Return {(heading, title): values from top to bottom} of the main table."""
    table = layout(results, main_table(results))
    keys = list(zip(table.headings, table.columns))
    return {key: [line.values[i] for line in table.lines] for i, key in enumerate(keys)}


def test_main_table_has_mean_and_deviation(unfinished):
    table = main_table(unfinished)
    a = table.iloc[0]
    assert a["dice_percent"] == pytest.approx(75)
    assert a["deviation_folds_points"] == pytest.approx(10 / 2**0.5)  # n - 1: (5^2 + 5^2) / 1
    assert np.isnan(a["deviation_seeds_points"])
    assert (a["kind"], a["folds"], a["folds_planned"]) == ("own folds", "0 1", 2)


def test_deviations_over_folds_and_seeds_are_of_their_means(tmp_path):
    planned = study("nnUNetTrainerSGD", "nnUNetTrainerCPR", seeds=(1, 2, 3))
    dice = {0: (0.70, 0.72, 0.74), 1: (0.80, 0.84, 0.88)}
    for fold, values in dice.items():
        for seed, value in zip((1, 2, 3), values):
            write_fold(tmp_path, f"nnUNetTrainerSGD_seed{seed}", fold, {f"a{fold}": both(value)})
            if seed < 3 or not fold:
                write_fold(tmp_path, f"nnUNetTrainerCPR_seed{seed}", fold, {f"a{fold}": both(value)})
    results = read(planned, tmp_path)
    first, second = main_table(results).iloc[:2].to_dict("records")
    values = 100 * np.array(list(dice.values()))
    assert first["dice_percent"] == pytest.approx(values.mean())
    assert first["deviation_folds_points"] == pytest.approx(np.std(values.mean(axis=1), ddof=1))
    assert first["deviation_seeds_points"] == pytest.approx(np.std(values.mean(axis=0), ddof=1))
    assert (second["folds"], second["runs"], second["runs_planned"]) == ("0", 5, 6)
    (own, common) = columns(results).values()
    assert own[0].below == ("± 8.49 over folds", "± 3.00 over seeds")
    assert own[1].below[-1] == "5 of 6 runs" and not own[0].best and not own[1].best
    assert [v.text for v in common] == ["72.00", "72.00"] and all(v.best for v in common)
    notes = " ".join(layout_notes(results))
    assert "over folds and over seeds" in notes and "Not all runs have finished" in notes


def test_unfinished_folds_are_marked_and_not_compared(unfinished):
    own, common, published = columns(unfinished).values()
    assert [v.text for v in own] == ["75.00", "72.00"]
    assert own[0].below == ("± 7.07",) and own[1].below == ("1 of 2 folds",)
    assert not any(v.best for v in own)
    assert [(v.text, v.best) for v in common] == [("70.00", False), ("72.00", True)]
    assert [(v.text, v.best) for v in published] == [("80.00", False), ("81.50", True)]
    assert list(columns(unfinished)) == [
        (DATASET, "Dice (%)"),
        (DATASET, "Dice (%), common folds (0)"),
        (DATASET, "published Dice (%)"),
    ]
    notes = layout_notes(unfinished)
    assert any("Somebody et al., table 1" in n for n in notes)
    assert any("Not all folds" in n for n in notes)


def test_trainers_are_rows_below_their_groups(unfinished):
    table = layout(unfinished, main_table(unfinished))
    assert [(group, [line.title for line in lines]) for group, lines in table.blocks] == [
        ("weight_decay", ["1e-5"]),
        ("CPR, Kappa-WS", ["1k"]),
    ]


def test_best_compares_rounded_values(tmp_path):
    for trainer, dice in (("A", 0.80001), ("B", 0.80002), ("C", 0.7)):
        for fold in (0, 1):
            write_fold(tmp_path, trainer, fold, {f"a{fold}": both(dice)})
    found = columns(read(study("A", "B", "C"), tmp_path))
    assert list(found) == [("", DATASET)]
    assert [v.best for v in found["", DATASET]] == [True, True, False]


def test_smallest_distance_is_best(tmp_path):
    for trainer, dice in (("A", 0.8), ("B", 0.7)):
        for fold in (0, 1):
            write_fold(tmp_path, trainer, fold, {f"a{fold}": both(dice)})
    results = read(study("A", "B", metrics=("dice", "hd95")), tmp_path)
    results = replace(results, cases=results.cases.assign(hd95=10 * results.cases["dice"]))
    table = main_table(results)
    assert table["hd95_mm"].tolist() == pytest.approx([8, 7])
    assert table["hd95_best"].tolist() == [False, True] and table["best"].tolist() == [True, False]
    # The hard case of B has a Dice, but its prediction is gone.
    gone = results.cases["trainer"].eq("B") & results.cases["fold"].eq(1)
    results = replace(results, cases=results.cases.assign(hd95=results.cases["hd95"].mask(gone)))
    table = main_table(results)
    assert not table["hd95_best"].any() and table["best"].tolist() == [True, False]
    assert list(columns(results)) == [(DATASET, "Dice (%)"), (DATASET, "HD95 (mm)")]
    assert "Lower is better for HD95." in layout_notes(results)[0]


def test_single_trainer_is_not_best(tmp_path):
    write_fold(tmp_path, "B", 0, {"a": both(0.8)})
    (values,) = columns(read(study("A", "B"), tmp_path)).values()
    assert [(v.text, v.below, v.best) for v in values] == [
        ("-", ("0 of 2 folds",), False),
        ("80.00", ("1 of 2 folds",), False),
    ]


def test_no_common_fold_gives_no_common_column(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.8)})
    write_fold(tmp_path, "B", 1, {"b": both(0.9)})
    (values,) = columns(read(study("A", "B"), tmp_path)).values()
    assert not any(v.best for v in values)


def test_several_configurations_are_named(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.8)}, configuration="2d")
    planned = study(WD, configurations=("2d", "3d_fullres"))
    found = columns(read(planned, tmp_path))
    assert [heading for heading, _ in found] == [f"{DATASET}, 2d", f"{DATASET}, 3d_fullres", DATASET]
    assert [values[0].text for values in found.values()] == ["80.00", "-", "80.00"]


def test_latex_escapes_groups_and_marks_the_best(unfinished):
    text = latex(layout(unfinished, main_table(unfinished)), layout_notes(unfinished))
    assert text.startswith("% Made by nnunet-cpr ")
    body = text.split("\n", 1)[1]
    assert body.startswith(r"\begin{tabular}{@{}lrrr@{}}") and "makeatletter" not in text
    assert r"\multicolumn{4}{@{}l}{weight\_decay} \\" in text
    assert r"\quad 1k & 72.00 & \textbf{72.00} & \textbf{81.50} \\" in text
    assert r" & {\scriptsize $\pm$ 7.07} &  &  \\" in text
    assert "% Published numbers: Somebody et al., table 1." in text
    assert text.index(r"\end{tabular}") < text.index("% Published")


def test_latex_rows_have_equal_columns(tmp_path):
    hard = TrainerEntry("A", r"50 % & #1 \x ~^ {a_b} [c] <d> $e", "[x]", {DATASET: 1.0})
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    results = read(study(hard, "B", source="100 % & more_"), tmp_path)
    text = latex(layout(results, main_table(results)), layout_notes(results))
    plain = re.sub(r"\\[&%$#_{}]", "", text)
    code = "\n".join(line for line in plain.splitlines() if not line.startswith("%"))
    assert code.count("{") == code.count("}") and code.count("$") % 2 == 0 and "%" not in code
    rows = re.findall(r"(?m)^(.*) \\\\$", plain)
    assert {row.count("&") for row in rows if "multicolumn" not in row} == {2}


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX (pdflatex) is not installed")
def test_latex_compiles_in_a_document(tmp_path):
    hard = TrainerEntry("A", r"50 % & #1 \x ~^ {a_b} [c] <d> $e", "[x]", {DATASET: 1.0})
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    results = read(study(hard, "B", source="100 % & more_"), tmp_path)
    text = latex(layout(results, main_table(results)), layout_notes(results))
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs}\begin{document}" + "\n" + text + r"\end{document}"
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "(1 page" in done.stdout


def test_markdown_table_has_groups_and_best(unfinished):
    text = markdown(layout(unfinished, main_table(unfinished)))
    header, rule, group, first, _, second = text.splitlines()
    assert header.startswith(r"| trainer | Dataset001\_Toy<br>Dice (%) |")
    assert rule == "| --- | ---: | ---: | ---: |"
    assert group == r"| *weight\_decay* |  |  |  |"
    assert first == "| 1e-5 | 75.00<br>± 7.07 | 70.00 | 80.00 |"
    assert second == "| 1k | 72.00<br>1 of 2 folds | **72.00** | **81.50** |"


@pytest.mark.parametrize(("width", "parts"), [(100, 1), (40, 3)])
def test_narrow_terminal_gets_the_table_in_parts(tmp_path, width, parts):
    names = [f"Dataset00{n}_SomeName" for n in (1, 2, 3)]
    for name in names:
        write_fold(tmp_path, "A", 0, {"a": both(0.72)}, dataset=name)
    results = read(study("A", "B", datasets=tuple(names)), tmp_path)
    console = Console(file=io.StringIO(), width=width)
    print_table(layout(results, main_table(results)), "[toy]", console)
    text = console.file.getvalue()
    assert text.count("[toy]") == parts and all(name in text for name in names)
    assert text.count("72.00") == 3 and "1 of 2 folds" in text


def test_class_table_averages_over_folds(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": {"1": 0.2, "2": 0.4}, "b": {"1": 0.4, "2": 0.4}})
    write_fold(tmp_path, "A", 1, {"c": {"1": 0.5, "2": float("nan")}})
    table = class_table(read(study("A", "B"), tmp_path), SETTING)
    assert table.columns == ("liver", "left_kidney")
    # liver: (0.3 + 0.5) / 2; the kidney is in fold 0 alone.
    (line,) = table.lines
    assert line.title == "A" and [value.text for value in line.values] == ["40.00", "40.00"]


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
    stopped = write_fold(tmp_path, "A", 2, {"a2": both(0.5)})
    (stopped / "validation" / "summary.json").unlink()
    write_log(stopped, {0: (0, 0, 0, 20.0)})
    write_json(stopped / "resources.json", {"seconds": 60, "peak_memory_bytes": 2**30})
    planned = study("A", "B", folds=(0, 1, 2))
    first, second = time_table(read(planned, tmp_path), SETTING).lines
    assert [v.text for v in first.values] == ["20.0 s", "1.5 min", "2.0 h", "2.0 GiB", "not recorded"]
    assert [v.text for v in second.values] == ["not recorded"] * 5


def test_all_files_have_the_same_results(tmp_path):
    planned = study("nnUNetTrainerSGD", "nnUNetTrainerCPR")
    folders = whole(tmp_path, planned)
    console = Console(file=io.StringIO(), width=100)
    files = write_report(planned, *folders, tmp_path / "report", console)
    assert sorted(f.name for f in files) == [
        "cases.csv", "classes.csv", "comparisons.csv", "figures", "non_inferiority.csv",
        "report.html", "report.md", "report.tex", "table.csv",
    ]  # fmt: skip
    assert sorted((tmp_path / "report").iterdir()) == sorted(files)
    cases = pd.read_csv(tmp_path / "report" / "cases.csv")
    assert list(cases.columns) == [
        "dataset", "configuration", "plans", "fold", "seed", "case", "class", "trainer", "dice",
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
        figures = sorted(files[-1].iterdir())
        assert files[-1].name == "figures" and len(figures) > 10
        texts.append({f.name: f.read_bytes() for f in [*files[:-1], *figures]})
    assert texts[0] == texts[1]


def test_study_files_know_every_metric():
    assert tuple(METRICS) == METRIC_NAMES
