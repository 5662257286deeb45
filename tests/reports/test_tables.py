"""Tables of a report, as numbers and as text."""

import pytest

from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.tables import (
    main_table,
    main_table_notes,
    shown_main_table,
    to_html,
    to_latex,
    to_markdown,
)
from nnunet_cpr.studies.definition import TrainerEntry
from tests.reports.folds import DATASET, NAN, both, study, write_fold

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
    table = shown_main_table(unfinished.by_setting())
    assert table.cells.to_numpy().tolist() == [
        ["75.00 ± 7.07", "80.00"],
        ["72.00 (1 of 2 runs)", "81.50"],
    ]
    assert list(table.cells.columns) == [(DATASET, "Dice (%)"), (DATASET, "published Dice (%)")]
    assert list(table.cells.index) == ["weight_decay 1e-5", "CPR <x> 1k | *"]
    notes = main_table_notes(unfinished.by_setting())
    assert notes[-1] == "Published numbers: Somebody et al., table 1."


def test_smallest_distance_is_best_if_no_case_lacks_it(tmp_path):
    for trainer, dice in (("A", 0.8), ("B", 0.7)):
        for fold in (0, 1):
            write_fold(tmp_path, trainer, fold, {f"a{fold}": both(dice)})
    results = read_results(study("A", "B", metrics=("dice", "hd95")), tmp_path)
    results.cases["hd95"] = 10 * results.cases["dice"]
    table = main_table(results.by_setting()[0])
    assert table["hd95_mm"].tolist() == pytest.approx([8, 7])
    assert table["hd95_best"].tolist() == [False, True] and table["best"].tolist() == [True, False]
    # The hard case of B has a Dice, but its prediction is gone.
    results.cases.loc[results.cases["trainer"].eq("B") & results.cases["fold"].eq(1), "hd95"] = NAN
    table = main_table(results.by_setting()[0])
    assert not table["hd95_best"].any() and table["best"].tolist() == [True, False]


def test_texts_escape_names_and_mark_the_best(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.7)})
    write_fold(tmp_path, "B", 0, {"a": both(0.72)})
    table = shown_main_table(read_results(study(WD, CPR, folds=(0,)), tmp_path).by_setting())
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
