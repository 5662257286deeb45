from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from nnunet_cpr.baselines import BASELINES
from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.vision import heatmaps
from nnunet_cpr.vision.dynamics_figure import CannotDraw
from nnunet_cpr.vision.folder import folder_of
from nnunet_cpr.vision.heatmaps import draw_sweep, table
from nnunet_cpr.vision.sweeps import SWEEPS, Axis, Panel, Sweep, grid
from nnunet_cpr.vision.tasks import TASKS
from tests.helpers.examples import examples

CIFAR = {name: sweep for name, sweep in SWEEPS.items() if name.startswith("cifar100-")}


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_every_cell_is_a_run_of_its_task_by_its_name(sweep: Sweep) -> None:
    cells = sweep.cells()
    assert len(set(map(str, cells))) == len(cells)
    for cell in cells:
        assert parse_run_name(str(cell)) == cell
        run = TASKS[sweep.task].complete(cell)
        assert run.bound.earliest < run.total_steps


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_cells_are_all_panels_with_all_seeds(sweep: Sweep) -> None:
    in_panels = {name for panel in sweep.panels for row in panel.names for name in row}
    assert {name.seed for name in in_panels} == {None}
    expected = {dataclasses.replace(name, seed=seed) for name in in_panels for seed in sweep.seeds}
    assert set(sweep.cells()) == expected
    first = sweep.cells()[: len(in_panels)]
    assert {cell.seed for cell in first} == {sweep.seeds[0]}


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_a_panel_names_a_run_once_and_panels_have_titles_of_their_own(sweep: Sweep) -> None:
    for panel in sweep.panels:
        names = [name for row in panel.names for name in row]
        assert len(set(names)) == len(names)
    titles = [panel.title for panel in sweep.panels]
    assert len(set(titles)) == len(titles)


def test_the_paper_is_covered() -> None:
    runs = {cell for sweep in CIFAR.values() for cell in sweep.cells()}
    assert {type(run.kappa) for run in runs} >= {KappaK, KappaKI0, KappaWS, KappaIP}
    assert {run.regularizer for run in runs} == {None, "std", "l1", "huber"}
    assert {run.family for run in runs} == {"AdamCPR", "AdamW", "SGDCPR", "SGD", "AMOS"}
    # Decoupled decay is what AdamW does by itself.
    assert {run.baseline.keyword for run in runs if run.baseline} == set(BASELINES) - {"decoupled"}
    adaptive = {type(run.kappa) for run in runs if run.adaptive}
    assert adaptive == {KappaK, KappaKI0, KappaWS}
    assert {run.mu for run in SWEEPS["cifar100-mu"].cells()} == {0.01, 0.1, 1.0, 10.0}
    assert {run.seed for run in runs} == {1, 2, 3}
    # 500 is the task's own and so is not said.
    assert {run.warmup for run in SWEEPS["cifar100-warmup"].cells()} == {None, 250, 1000}


def test_the_interval_of_kappa_ip_is_a_tenth_of_the_warmup() -> None:
    for sweep in CIFAR.values():
        for cell in map(TASKS[sweep.task].complete, sweep.cells()):
            if isinstance(cell.kappa, KappaIP):
                assert cell.kappa.interval == cell.warmup_steps // 10


def test_sweeps_of_one_task_share_their_runs() -> None:
    main, warmup = SWEEPS["cifar100-main"], SWEEPS["cifar100-warmup"]
    assert set(main.cells()) < set(warmup.cells())


def test_known_names() -> None:
    names = set(map(str, SWEEPS["cifar100-related"].cells()))
    assert names > {
        "AdamCPR_ws1000_lr1en3_seed1",
        "AdamW_lr1en3_wd0p1_seed2",
        "AdamW_adadecay4_lr1en3_wd0p1_seed3",
        "AdamW_awd_lr1en4_wd0p01_seed1",
        "AMOS_lr0p01_wd0p3_seed1",
        "AdamW_rescale0p8_lr3en3_seed1",
        "AdamW_lr1en3_wd0_seed1",
    }


def test_a_panel_needs_a_cell_for_each_row_and_column() -> None:
    with pytest.raises(ValueError, match="has not one cell"):
        Panel("odd", Axis("a", ("1", "2")), Axis("b", ("1",)), ((RunName("SGD"),),))


def test_the_list_of_sweeps_loads_neither_torchvision_nor_timm() -> None:
    code = (
        "import sys, nnunet_cpr.vision.sweeps, nnunet_cpr.vision.tasks\n"
        "assert not {'torchvision', 'timm', 'sklearn', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The table and the figure


def small(rows: int = 2, columns: int = 3, panels: int = 2, seeds: tuple[int, ...] = (1, 2)) -> Sweep:
    families = ("AdamW", "SGD", "AMOS")
    return Sweep(
        "small",
        "A sweep for tests",
        "cifar100",
        tuple(
            grid(
                f"panel {number}",
                ("weight decay", {str(i): {"weight_decay": 0.1 / (i + 1)} for i in range(rows)}),
                ("learning rate", {str(j): {"lr": 0.1 / (j + 1)} for j in range(columns)}),
                families[number],
            )
            for number in range(panels)
        ),
        seeds,
        across=2,
    )


def finish(
    sweep: Sweep, results: Path, name: RunName, value: Any, conditions: dict[str, str] | None = None
) -> None:
    task = TASKS[sweep.task]
    folder = folder_of(results, task, name)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"run": str(name), "settings": conditions or {}, "metric": task.metric, "loss": 1.0}
    result[task.metric] = value
    (folder / "result.json").write_text(json.dumps(result))


@examples(10, search=100)
@given(data=st.data())
def test_the_table_has_mean_and_deviation_of_what_is_done(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sweep, results = small(seeds=(1, 2, 3)), tmp_path_factory.mktemp("results")
    done: dict[str, list[float]] = {}
    for cell in sweep.cells():
        value = data.draw(st.none() | st.floats(0, 100))
        if value is not None:
            finish(sweep, results, cell, value)
            done.setdefault(str(dataclasses.replace(cell, seed=None)), []).append(value)
    cells = table(sweep, results)
    assert list(cells.columns) == heatmaps.COLUMNS
    assert len(cells) == 12
    for cell in cells.itertuples():
        values = done.get(cell.run, [])
        assert cell.n == len(values)
        if values:
            assert cell.mean == pytest.approx(sum(values) / len(values))
        else:
            assert math.isnan(cell.mean)
        if len(values) > 1:
            assert cell.std == pytest.approx(np.std(values, ddof=1))
        else:
            assert math.isnan(cell.std)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "70", None, [70.0]], ids=type)
def test_a_result_that_is_no_number_is_not_counted(value: Any, tmp_path: Path) -> None:
    sweep = small(seeds=(1,))
    first = sweep.cells()[0]
    finish(sweep, tmp_path, first, value)
    assert table(sweep, tmp_path)["n"].sum() == 0


def diverge(sweep: Sweep, results: Path, name: RunName) -> None:
    folder = folder_of(results, TASKS[sweep.task], name)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"run": str(name), "settings": {}, "metric": "accuracy", "diverged": 40}
    (folder / "result.json").write_text(json.dumps(result))


def test_diverged_runs_are_counted_and_said(tmp_path: Path) -> None:
    sweep = small(rows=1, columns=3, panels=1)
    names = sweep.panels[0].names[0]
    for name, seeds in zip(names, ((), (1,), (1, 2))):
        for seed in sweep.seeds:
            run = dataclasses.replace(name, seed=seed)
            if seed in seeds:
                diverge(sweep, tmp_path, run)
            else:
                finish(sweep, tmp_path, run, 70.0)
    cells = table(sweep, tmp_path)
    assert cells["n"].tolist() == [2, 1, 0] and cells["diverged"].tolist() == [0, 1, 2]
    assert cells["mean"].tolist()[:2] == [70.0, 70.0] and math.isnan(cells["mean"][2])
    assert drawn(sweep, cells) == [["70.00★\n±0.00", "70.00\nn=1", "diverged"]]
    assert heatmaps._title(sweep, cells).endswith("3 of 6 runs done, 3 diverged.")


def test_the_papers_numbers_are_beside_ours(tmp_path: Path) -> None:
    sweep = SWEEPS["deit-base"]
    first = sweep.cells()[0]
    finish(sweep, tmp_path, first, 75.0)
    cells = draw_sweep(sweep, tmp_path, tmp_path / "deit-base.png")
    known = cells.set_index("run")["published"].dropna().to_dict()
    assert known == dict(sweep.published) and len(known) == 6
    saved = pd.read_csv(tmp_path / "deit-base.csv").set_index("run")["published"].dropna().to_dict()
    assert saved == pytest.approx(known)
    texts = drawn(sweep, cells)
    assert texts[0] == ["75.00★", "76.19", "78.59", "80.56"]
    assert texts[1] == ["81.19", "79.61"]  # the paper has no third
    assert heatmaps._best(cells) == 0  # theirs do not compete


def test_runs_of_different_data_are_not_drawn_together(tmp_path: Path) -> None:
    sweep = small()
    for number, cell in enumerate(sweep.cells()[:3]):
        finish(sweep, tmp_path, cell, 50.0, {} if number == 0 else {"data": f"{number} files"})
    with pytest.raises(CannotDraw, match=r"^AdamW\S+ and AdamW\S+ are of different data; keep"):
        draw_sweep(sweep, tmp_path, tmp_path / "small.png")
    assert not list(tmp_path.glob("small*"))


def drawn(sweep: Sweep, cells: pd.DataFrame) -> list[list[str]]:
    """The texts in the cells of each panel."""
    figure = heatmaps._figure(sweep, cells)
    return [[text.get_text() for text in ax.texts] for ax in figure.axes[: len(sweep.panels)]]


def test_the_cells_say_mean_deviation_and_missing_seeds(tmp_path: Path) -> None:
    sweep = small()
    names = [name for panel in sweep.panels for row in panel.names for name in row]
    values = {0: (70.0, 72.0), 1: (75.0,), 6: (73.0, 74.0)}
    for index, numbers in values.items():
        for seed, value in zip(sweep.seeds, numbers):
            finish(sweep, tmp_path, dataclasses.replace(names[index], seed=seed), value)
    cells = draw_sweep(sweep, tmp_path, tmp_path / "small.png")
    assert drawn(sweep, cells) == [["71.00\n±1.41", "75.00\nn=1"], ["73.50★\n±0.71"]]
    assert heatmaps._best(cells) == 6  # the better one has one seed only
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "small.csv", dtype={"row": str, "column": str}), cells, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["cifar100-related", "digits", "clip-vit-b32"])
def test_texts_do_not_overlap(tmp_path: Path, name: str) -> None:
    sweep = SWEEPS[name]
    for number, cell in enumerate(sweep.cells()):
        if number % 7:
            finish(sweep, tmp_path, cell, 70 + number % 13)
    figure = heatmaps._figure(sweep, table(sweep, tmp_path))
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    page = figure.bbox
    boxes = []
    for ax in figure.axes:
        labels = [*ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label]
        texts = [*ax.texts, ax._left_title, *(label for label in labels if label.get_visible())]
        boxes += [text.get_window_extent(renderer) for text in texts if text.get_text()]
    boxes += [text.get_window_extent(renderer) for text in figure.texts]
    for i, box in enumerate(boxes):
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert not any(box.overlaps(other) for other in boxes[:i])


@pytest.mark.parametrize("done", ["nothing", "one", "equal"])
def test_what_is_not_run_is_grey(tmp_path: Path, done: str) -> None:
    sweep = small(panels=3)
    count = {"nothing": 0, "one": 1, "equal": None}[done]
    for cell in sweep.cells()[:count]:
        finish(sweep, tmp_path, cell, 50.0)
    draw_sweep(sweep, tmp_path, tmp_path / "small.png")
    image = (imread(tmp_path / "small.png")[..., :3] * 255).round()
    grey = (np.abs(image - 0.85 * 255) <= 1).all(axis=-1).mean()
    assert (grey > 0.05) == (done != "equal")


def test_a_failed_run_does_not_take_the_colours_of_the_others() -> None:
    means = np.array([1.0, 74.0, 75.0, 76.0, math.nan])
    shades = heatmaps._Shades.of(means)
    assert (shades.norm.vmin, shades.norm.vmax, shades.extend) == (70.0, 76.0, "min")
    assert heatmaps._Shades.of(means[1:]).extend == "neither"
