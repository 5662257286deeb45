"""Tables of a report, as numbers and as text."""

import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.results import Setting, read_results
from nnunet_cpr.reports.tables import (
    class_table,
    main_table,
    main_table_notes,
    shown_main_table,
    time_table,
    to_html,
    to_latex,
    to_markdown,
)
from nnunet_cpr.studies.definition import METRIC_NAMES, TrainerEntry
from tests.helpers.report_folds import DATASET, both, study, write_fold, write_json, write_log

SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")
WD = TrainerEntry("A", "1e-5", "weight_decay", {DATASET: 80.0})
CPR = TrainerEntry("B", "1k | *", "CPR <x>", {DATASET: 81.5})


def read(planned, results):
    return read_results(planned, results)


@pytest.fixture
def unfinished(tmp_path):
    """Results in which A has folds 0 and 1, and B has fold 0 only."""
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    write_fold(tmp_path, "A", 1, {"b": both(0.8)})
    write_fold(tmp_path, "B", 0, {"a": both(0.72)})
    return read(study(WD, CPR, source="Somebody et al., table 1"), tmp_path)


def shown(results):
    return shown_main_table(results, main_table(results))


def test_deviations_over_folds_and_seeds_are_of_their_means(tmp_path):
    planned = study("nnUNetTrainerSGD", "nnUNetTrainerCPR", seeds=(1, 2, 3))
    dice = {0: (0.70, 0.72, 0.74), 1: (0.80, 0.84, 0.88)}
    for fold, values in dice.items():
        for seed, value in zip((1, 2, 3), values):
            write_fold(tmp_path, f"nnUNetTrainerSGD_seed{seed}", fold, {f"a{fold}": both(value)})
            if seed < 3 or not fold:
                write_fold(tmp_path, f"nnUNetTrainerCPR_seed{seed}", fold, {f"a{fold}": both(value)})
    results = read(planned, tmp_path)
    first, second = main_table(results).to_dict("records")
    values = 100 * np.array(list(dice.values()))
    assert first["dice_percent"] == pytest.approx(values.mean())
    assert first["deviation_folds_points"] == pytest.approx(np.std(values.mean(axis=1), ddof=1))
    assert first["deviation_seeds_points"] == pytest.approx(np.std(values.mean(axis=0), ddof=1))
    assert (second["folds"], second["runs"], second["runs_planned"]) == ("0 1", 5, 6)
    cells = shown(results).cells[DATASET]
    assert "**" not in "".join(cells)
    assert cells.iloc[0] == "78.00 ± 8.49 ± 3.00" and cells.iloc[1].endswith(" (5 of 6 runs)")
    notes = " ".join(main_table_notes(results))
    assert "± standard deviation over folds ± over seeds" in notes and "cannot be compared" in notes


def test_unfinished_trainers_have_no_best_and_published_numbers_a_column(unfinished):
    table = shown(unfinished)
    assert table.cells.to_numpy().tolist() == [
        ["75.00 ± 7.07", "80.00"],
        ["72.00 (1 of 2 runs)", "81.50"],
    ]
    assert list(table.cells.columns) == [(DATASET, "Dice (%)"), (DATASET, "published Dice (%)")]
    assert list(table.cells.index) == ["weight_decay 1e-5", "CPR <x> 1k | *"]
    assert main_table_notes(unfinished)[-1] == "Published numbers: Somebody et al., table 1."


def test_best_compares_values_as_shown(tmp_path):
    for trainer, dice in (("A", 0.80001), ("B", 0.80002), ("C", 0.7)):
        write_fold(tmp_path, trainer, 0, {"a": both(dice)})
    assert main_table(read(study("A", "B", "C", folds=(0,)), tmp_path))["best"].tolist() == [
        True, True, False,
    ]  # fmt: skip
    assert not main_table(read(study("B", folds=(0,)), tmp_path))["best"].any()


def test_smallest_distance_is_best(tmp_path):
    for trainer, dice in (("A", 0.8), ("B", 0.7)):
        write_fold(tmp_path, trainer, 0, {"a": both(dice)})
    results = read(study("A", "B", folds=(0,), metrics=("dice", "hd95")), tmp_path)
    assert "hd95_mm" not in main_table(results)  # it could not be computed
    results = replace(results, cases=results.cases.assign(hd95=10 * results.cases["dice"]))
    table = main_table(results)
    assert table["hd95_mm"].tolist() == pytest.approx([8, 7])
    assert table["hd95_best"].tolist() == [False, True] and table["best"].tolist() == [True, False]
    assert list(shown(results).cells) == [(DATASET, "Dice (%)"), (DATASET, "HD95 (mm)")]
    assert "HD95: lower is better." in main_table_notes(results)[0]


def test_several_configurations_are_named(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.8)}, configuration="2d")
    table = shown(read(study("A", folds=(0,), configurations=("2d", "3d_fullres")), tmp_path))
    assert dict(table.cells.iloc[0]) == {
        f"{DATASET}, 2d": "80.00",
        f"{DATASET}, 3d_fullres": "- (0 of 1 runs)",
    }


def test_texts_escape_names_and_mark_the_best(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    write_fold(tmp_path, "B", 0, {"a": both(0.72)})
    table = shown(read(study(WD, CPR, folds=(0,)), tmp_path))
    header, rule, first, second = to_markdown(table).splitlines()
    assert header.startswith(f"| trainer | {DATASET} Dice (%) |") and rule == "| --- | ---: | ---: |"
    assert first == r"| weight\_decay 1e-5 | 70.00 | 80.00 |"
    assert second == r"| CPR \<x\> 1k \| \* | **72.00** | 81.50 |"
    html = to_html(table)
    assert "CPR &lt;x&gt;" in html and html.count("<strong>") == 1 and "<strong>72.00</strong>" in html
    latex = to_latex(table, ["a note"])
    assert r"weight\_decay 1e-5 & 70.00 & 80.00 \\" in latex and latex.endswith("% a note\n")
    assert r"1k | * & \textbf{72.00} & 81.50 \\" in latex and r"\toprule" in latex


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX (pdflatex) is not installed")
def test_latex_compiles_in_a_document(tmp_path):
    hard = TrainerEntry("A", r"50 % & #1 \x ~^ {a_b} [c] <d> $e", "[x]", {DATASET: 1.0})
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    text = to_latex(shown(read(study(hard, "B"), tmp_path)), ["100 % & more_"])
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    (tmp_path / "paper.tex").write_text(f"{head}\n{text}" + r"\end{document}")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]


def test_class_table_averages_over_runs(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": {"1": 0.2, "2": 0.4}, "b": {"1": 0.4, "2": 0.4}})
    write_fold(tmp_path, "A", 1, {"c": {"1": 0.5, "2": float("nan")}})
    classes = class_table(read(study("A", "B"), tmp_path), SETTING, METRICS["dice"]).cells
    # liver: (0.3 + 0.5) / 2; the kidney is in fold 0 alone.
    assert classes.to_dict("index") == {"A": {"liver": "40.00", "left_kidney": "40.00"}}


def test_time_table_has_medians_and_sums(tmp_path):
    for fold, seconds in ((0, (100.0, 10.0, 10.0)), (1, (20.0, 20.0, 20.0))):
        folder = write_fold(tmp_path, "A", fold, {f"a{fold}": both(0.5)})
        write_log(folder, {e: (0, 0, 0, s) for e, s in enumerate(seconds)})
        memory = {"peak_memory_bytes": (fold + 1) * 2**30, "peak_gpu_memory_bytes": None}
        write_json(folder / "resources.json", {"seconds": 7200, **memory})
    table = time_table(read(study("A", "B"), tmp_path), SETTING).cells
    assert table.loc["A"].tolist() == ["20.0", "1.5", "120.0", "2.0", "-"] and list(table.index) == ["A"]


def test_study_files_know_every_metric():
    assert tuple(METRICS) == METRIC_NAMES
