import re

import numpy as np
import pytest

from nnunet_cpr.reports.figures import INDEX, draw, file_name, write_figures
from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.plots import FOREST_TRAINERS, ForestRow, forest_plots
from nnunet_cpr.reports.results import Setting

SETTING = Setting("Dataset004_Hippocampus", "3d_fullres", "nnUNetPlans")


def drawing(name):
    with draw(name, (2, 2)) as (figure, result):
        figure.subplots().plot([0, 1], [0, 1], color="#b34700", label="é")
    return result


def test_pdf_embeds_truetype_and_has_no_date():
    first, second = drawing("a").files, drawing("a").files
    assert first == second
    assert b"/FontFile2" in first["pdf"] and b"CreationDate" not in first["pdf"]
    assert b"<dc:date>" not in first["svg"] and b"#b34700" in first["svg"]
    assert b"<text" not in first["svg"]  # glyphs are outlines


def test_stale_figures_of_an_earlier_report_are_removed(tmp_path):
    write_figures(tmp_path, [drawing("a"), drawing("b")])
    (tmp_path / "mine.pdf").write_bytes(b"mine")
    write_figures(tmp_path, [drawing("b")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.pdf", "b.svg", INDEX, "mine.pdf"]


def test_index_cannot_remove_other_files(tmp_path):
    (tmp_path / "outside.pdf").write_bytes(b"mine")
    folder = tmp_path / "figures"
    write_figures(folder, [drawing("a")])
    (folder / "notes.txt").write_text("mine")
    (folder / INDEX).write_text("../outside.pdf\nnotes.txt\n\n")
    write_figures(folder, [])
    assert (tmp_path / "outside.pdf").exists() and (folder / "notes.txt").exists()


def test_long_file_names_are_cut_and_unique():
    names = {file_name("x" * 300 + end) for end in "ab"}
    assert len(names) == 2 and all(len(name) <= 180 for name in names)
    assert file_name("a/b c") == "a_b_c"


def forest(trainers, classes=2, metric="dice"):
    rows = [
        ForestRow(f"trainer {t}", name, 0.1 * t, 0.1 * t - 0.2, 0.1 * t + 0.2 if c else float("nan"))
        for t in range(trainers)
        for c, name in enumerate([*(f"class {n}" for n in range(classes)), "mean"])
    ]
    return forest_plots(rows, METRICS[metric], 0.1, "the $reference", SETTING)


def test_forest_plot_has_all_rows_in_its_text():
    (picture,) = forest(2)
    assert picture.drawing.name == "forest-Dataset004_Hippocampus-3d_fullres-nnUNetPlans-dice"
    for part in ("trainer 1, class 1 +0.10 (-0.10 to +0.30)", "trainer 0, mean +0.00", "-0.1 to +0.1"):
        assert part in picture.alt
    assert "right of 0: better than the $reference" in re.sub(r"\s+", " ", picture.svg)
    assert "var(--line-0)" in picture.svg and "currentColor" in picture.svg


def test_forest_plots_of_many_trainers_are_split():
    pictures = forest(9)
    assert len(pictures) == -(-9 // FOREST_TRAINERS)
    assert [p.drawing.name[-6:] for p in pictures] == ["s-dice", "dice-2", "dice-3"]


def test_forest_plot_names_the_better_side_of_distances():
    assert "left of 0: better" in forest(1, metric="hd95")[0].svg


@pytest.mark.parametrize("name", list(METRICS))
def test_metrics_have_columns_and_texts(name):
    metric = METRICS[name]
    assert metric.column in ("dice_percent", "hd95_mm", "nsd_percent")
    assert metric.text(np.nan) == metric.difference_text(np.nan) == "-"
