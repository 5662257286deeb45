"""Tables of a report, as numbers and as text."""

import json

import pytest

from nnunet_cpr.reports.comparison import judge
from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.pairing import compare_with
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.reports.structures import failed_table
from nnunet_cpr.reports.tables import (
    class_table,
    main_table,
    main_table_notes,
    shown_main_table,
    to_html,
    to_latex,
    to_markdown,
)
from nnunet_cpr.studies.study import METRIC_NAMES, TrainerEntry
from tests.reports.folds import DATASET, NAN, both, study, write_fold, write_json
from tests.reports.test_comparison import noisy, write_runs

WD = TrainerEntry("A", "1e-5", "weight_decay", {DATASET: 80.0})
CPR = TrainerEntry("B", "1k | *", "CPR <x>", {DATASET: 81.5})


@pytest.fixture
def unfinished(tmp_path):
    """Results in which A has folds 0 and 1, and B has fold 0 only."""
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    write_fold(tmp_path, "A", 1, {"b": both(0.8)})
    write_fold(tmp_path, "B", 0, {"a": both(0.72)})
    return read_results(study(WD, CPR, source="Somebody et al., table 1"), tmp_path)


def test_unfinished_trainers_have_no_best_and_published_numbers_a_column(unfinished):
    table = shown_main_table(unfinished.by_condition())
    assert table.cells.to_numpy().tolist() == [
        ["75.00 ± 7.07", "80.00"],
        ["72.00 (1 of 2 runs)", "81.50"],
    ]
    assert list(table.cells.columns) == [(DATASET, "Dice (%)"), (DATASET, "published Dice (%)")]
    assert list(table.cells.index) == ["weight_decay 1e-5", "CPR <x> 1k | *"]
    notes = main_table_notes(unfinished.by_condition())
    assert notes[-2] == "Published numbers: Somebody et al., table 1."


@pytest.mark.parametrize(
    ("gain", "training", "better"),
    [(0.02, 0.002, [False, True, False]), (0.0, 0.0, [False] * 3), (0.001, 0.02, [False] * 3)],
    ids=["shown", "tied", "not significant"],
)
def test_bold_is_the_verdict_better(tmp_path, gain, training, better):
    """The comparison is that with the reference, the first trainer, as in the sentences."""
    write_runs(tmp_path, "A", noisy(0.8, folds=(0, 1, 2), training=training, residual=training))
    write_runs(tmp_path, "B", noisy(0.8 + gain, folds=(0, 1, 2), training=training, residual=training))
    write_runs(tmp_path, "C", noisy(0.7, folds=(0, 1, 2)))
    planned = study("A", "B", "C", folds=(0, 1, 2), seeds=(1, 2, 3), metrics=("dice", "hd95"))
    results = read_results(planned, tmp_path)
    results.cases["hd95"] = 10 * (1 - results.cases["dice"])
    parts = results.by_condition()

    def judged():
        return judge(compare_with([choose_compared(each) for each in parts], "A"))

    table = main_table(parts[0], judged())
    assert table["better"].tolist() == table["hd95_better"].tolist() == better
    bold = shown_main_table(parts, judged()).cells.map(lambda cell: cell.startswith("**"))
    assert bold.to_numpy().tolist() == [[each, each] for each in better]
    # A case of B has a Dice, but its prediction is gone.
    is_gone = parts[0].cases["trainer"].eq("B") & parts[0].cases["seed"].eq(1)
    parts[0].cases.loc[is_gone & parts[0].cases["case"].eq("case_0_00"), "hd95"] = NAN
    table = main_table(parts[0], judged())
    assert not table["hd95_better"].any() and table["better"].tolist() == better


def test_distances_of_one_empty_mask_are_counted_instead_of_the_diagonal(tmp_path):
    voxels = {"a": ((9, 9), (0, 9)), "b": ((9, 9), (0, 9)), "c": ((9, 0), (0, 0))}  # predicted, true
    folder = write_fold(tmp_path, "A", 0, {case: {"1": 0.5, "2": 0.0} for case in voxels})
    path = folder / "validation" / "summary.json"
    summary = json.loads(path.read_text())
    for case, of_case in zip(summary["metric_per_case"], voxels.values()):
        for metrics, (predicted, true) in zip(case["metrics"].values(), of_case):
            metrics |= {"n_pred": predicted, "n_ref": true}
    write_json(path, summary)
    results = read_results(study("A", folds=(0,), metrics=("dice", "hd95")), tmp_path)
    results.cases["hd95"] = [3.0, 72.12, 5.0, 72.12, 72.12, NAN]
    (part,) = results.by_condition()
    assert class_table(part, METRICS["hd95"]).cells.loc["A"].tolist() == [
        "26.71, falsely found in 1 of 3 cases",
        "not found in 2 of 2 cases",
    ]
    (cell,) = shown_main_table([part]).cells[DATASET, "HD95 (mm)"]
    assert cell == "49.41, not found in 2 of 3 cases, falsely found in 1 of 3 cases"
    assert class_table(part, METRICS["dice"]).cells.loc["A"].tolist() == ["50.00", "0.00"]


def test_texts_escape_names_and_mark_the_best(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    write_fold(tmp_path, "B", 0, {"a": both(0.72)})
    table = shown_main_table(read_results(study(WD, CPR, folds=(0,)), tmp_path).by_condition())
    assert table.cells.iat[1, 0] == "72.00"  # nothing is shown by one run
    table.cells.iat[1, 0] = "**72.00**"
    ours = table._replace(cells=table.cells.rename(index={"weight_decay 1e-5": "**Ours**"}))
    text = to_latex(ours, [])
    assert r"\textbf{Ours" not in text and "*{}*Ours*{}* & 70.00" in text
    header, rule, first, second = to_markdown(table).splitlines()
    assert (
        header.startswith(r"| trainer | Dataset001\_Toy Dice (%) |") and rule == "| --- | ---: | ---: |"
    )
    assert first == r"| weight\_decay 1e-5 | 70.00 | 80.00 |"
    assert second == r"| CPR \<x\> 1k \| \* | **72.00** | 81.50 |"
    html = to_html(table)
    assert "CPR &lt;x&gt;" in html and html.count("<strong>") == 1 and "<strong>72.00</strong>" in html
    latex = to_latex(table, ["a note"])
    assert r"weight\_decay 1e-5 & 70.00 & 80.00 \\" in latex and latex.endswith("% a note\n")
    assert r"1k | * & \textbf{72.00} & 81.50 \\" in latex and r"\toprule" in latex


def test_every_metric_of_study_files_is_one_of_reports():
    assert tuple(METRICS) == METRIC_NAMES


def test_failed_cases_are_named(tmp_path):
    runs = noisy(0.8, folds=(0, 1, 2))
    write_runs(tmp_path, "A", runs)
    failing = {seed: {fold: dice.copy() for fold, dice in folds.items()} for seed, folds in runs.items()}
    for folds in failing.values():
        folds[1][3] = 0.01
    write_runs(tmp_path, "B", failing)
    (part,) = read_results(study("A", "B", folds=(0, 1, 2), seeds=(1, 2, 3)), tmp_path).by_condition()
    found = failed_table(part)
    assert found is not None and found.cells.to_dict("list") == {"failed": ["1"], "cases": ["case_1_03"]}
    assert list(found.cells.index) == ["B"]
