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
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from nnunet_cpr.baselines.registry import BASELINES
from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.vision import heatmaps, learning_curves
from nnunet_cpr.vision.folder import run_folder
from nnunet_cpr.vision.heatmaps import draw_sweep, summarize_sweep
from nnunet_cpr.vision.sweeps import SWEEPS, Axis, Panel, Sweep, grid
from nnunet_cpr.vision.task import CannotDraw
from nnunet_cpr.vision.tasks import TASKS
from tests.helpers.examples import examples

CIFAR = {name: sweep for name, sweep in SWEEPS.items() if name.startswith("cifar100-")}


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_every_run_is_valid_for_its_task(sweep: Sweep) -> None:
    runs = sweep.runs()
    assert len(set(map(str, runs))) == len(runs)
    for run in runs:
        assert parse_run_name(str(run)) == run
        complete = TASKS[sweep.task].complete(run)
        assert complete.bound.earliest < complete.total_steps


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_runs_are_all_cells_with_all_seeds(sweep: Sweep) -> None:
    in_panels = {name for panel in sweep.panels for row in panel.names for name in row}
    assert {name.seed for name in in_panels} == {None}
    expected = {dataclasses.replace(name, seed=seed) for name in in_panels for seed in sweep.seeds}
    assert set(sweep.runs()) == expected
    first = sweep.runs()[: len(in_panels)]
    assert {run.seed for run in first} == {sweep.seeds[0]}


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_panel_titles_and_their_runs_are_unique(sweep: Sweep) -> None:
    for panel in sweep.panels:
        names = [name for row in panel.names for name in row]
        assert len(set(names)) == len(names)
    titles = [panel.title for panel in sweep.panels]
    assert len(set(titles)) == len(titles)


def test_sweeps_cover_the_paper() -> None:
    runs = {run for sweep in CIFAR.values() for run in sweep.runs()}
    assert {type(run.kappa) for run in runs} >= {KappaK, KappaKI0, KappaWS, KappaIP}
    assert {run.regularizer for run in runs} == {None, "std", "l1", "huber"}
    assert {run.family for run in runs} == {"AdamCPR", "AdamW", "SGDCPR", "SGD", "AMOS"}
    of_the_paper = {"adadecay", "awd", "cosine", "rescale"}
    assert {run.baseline.keyword for run in runs if run.baseline} == of_the_paper
    adaptive = {type(run.kappa) for run in runs if run.adaptive}
    assert adaptive == {KappaK, KappaKI0, KappaWS}
    assert {run.mu for run in SWEEPS["cifar100-mu"].runs()} == {0.01, 0.1, 1.0, 10.0}
    assert {run.seed for run in runs} == {1, 2, 3}
    # The task's default of 500 is left out.
    assert {run.warmup for run in SWEEPS["cifar100-warmup"].runs()} == {None, 250, 1000}


def test_small_sweeps_compare_every_method() -> None:
    keywords = {
        name: {run.baseline.keyword for run in SWEEPS[name].runs() if run.baseline}
        for name in ("digits", "grokking")
    }
    assert keywords["digits"] == set(BASELINES)
    recent = {"corrected", "cautious", "independent", "norm", "normws", "hyperball"}
    assert keywords["grokking"] == recent - {"corrected"}  # its network has no normalization


def test_kappa_ip_interval_is_a_tenth_of_the_warmup() -> None:
    for sweep in CIFAR.values():
        for run in map(TASKS[sweep.task].complete, sweep.runs()):
            if isinstance(run.kappa, KappaIP):
                assert run.kappa.interval == run.warmup_steps // 10


def test_sweeps_of_one_task_share_runs() -> None:
    main, warmup = SWEEPS["cifar100-main"], SWEEPS["cifar100-warmup"]
    assert set(main.runs()) < set(warmup.runs())


def test_sweep_of_related_work_has_known_names() -> None:
    names = set(map(str, SWEEPS["cifar100-related"].runs()))
    assert names > {
        "AdamCPR_ws1000_lr1en3_seed1",
        "AdamW_lr1en3_wd0p1_seed2",
        "AdamW_adadecay4_lr1en3_wd0p1_seed3",
        "AdamW_awd_lr1en4_wd0p01_seed1",
        "AMOS_lr0p01_wd0p3_seed1",
        "AdamW_rescale0p8_lr3en3_seed1",
        "AdamW_lr1en3_wd0_seed1",
    }


def test_panel_needs_a_cell_for_each_row_and_column() -> None:
    with pytest.raises(ValueError, match=r"panel 'odd': expected rows of \[1, 1\] cells, got \[1\]"):
        Panel("odd", Axis("a", ("1", "2")), Axis("b", ("1",)), ((RunName("SGD"),),))


def test_sweeps_are_listed_without_torchvision_and_timm() -> None:
    code = (
        "import sys, nnunet_cpr.vision.sweeps, nnunet_cpr.vision.tasks\n"
        "assert not {'torchvision', 'timm', 'sklearn', 'matplotlib', 'seaborn'} & set(sys.modules)"
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
    sweep: Sweep, results: Path, name: RunName, value: Any, settings: dict[str, str] | None = None
) -> None:
    task = TASKS[sweep.task]
    folder = run_folder(results, task, name)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"run": str(name), "settings": settings or {}, "metric": task.metric, task.metric: value}
    result |= {"loss": 1.0, "step": 9, "seconds": 1.5}
    (folder / "result.json").write_text(json.dumps(result))


@examples(10, search=100)
@given(data=st.data())
def test_summary_has_mean_and_std_of_finished_runs(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sweep, results = small(seeds=(1, 2, 3)), tmp_path_factory.mktemp("results")
    done: dict[str, list[float]] = {}
    for run in sweep.runs():
        value = data.draw(st.none() | st.floats(0, 100))
        if value is not None:
            finish(sweep, results, run, value)
            done.setdefault(str(dataclasses.replace(run, seed=None)), []).append(value)
    cells = summarize_sweep(sweep, results)
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


def table(samples: list[list[float]], runs: list[str] | None = None) -> pd.DataFrame:
    """Return the columns of a summary that tests need."""
    return pd.DataFrame(
        {
            "run": runs or [f"run {i}" for i in range(len(samples))],
            "n": list(map(len, samples)),
            "mean": [float(np.mean(values)) if values else math.nan for values in samples],
            "std": [
                float(np.std(values, ddof=1)) if len(values) > 1 else math.nan for values in samples
            ],
        }
    )


def test_differences_from_best_are_those_of_scipy() -> None:
    random = np.random.default_rng(0)
    samples = [list(random.normal(i, 1 + i, size=3 + i % 2)) for i in range(5)]
    cells = table(samples)
    best = heatmaps._find_best(cells)
    tests = [scipy.stats.ttest_ind(samples[best], values, equal_var=False) for values in samples]
    expected = [min(10 * test.pvalue, 1) for test in tests]  # 10 pairs
    expected[best] = math.nan
    np.testing.assert_allclose(heatmaps.differences_from_best(cells), expected, rtol=1e-6)


def test_differences_from_best_need_two_runs() -> None:
    cells = table([[], [1.0], [5.0, 6.0], [5.0, 6.0], [1.0, 1.2]], ["a", "b", "c", "c", "d"])
    found = heatmaps.differences_from_best(cells)
    assert [math.isnan(p) for p in found] == [True, True, True, True, False]
    test = scipy.stats.ttest_ind([5.0, 6.0], [1.0, 1.2], equal_var=False)
    assert found[4] == pytest.approx(3 * test.pvalue)  # pairs of b, c and d
    assert all(map(math.isnan, heatmaps.differences_from_best(table([[1.0], [2.0]]))))
    assert all(map(math.isnan, heatmaps.differences_from_best(table([[], []]))))


def test_equal_cells_rarely_get_a_star() -> None:
    random = np.random.default_rng(1)
    simulated = [table(random.normal(size=(6, 5)).tolist()) for _ in range(100)]
    stars = 0
    for cells in simulated:
        cells["p"] = heatmaps.differences_from_best(cells)
        stars += heatmaps._find_significant_best(cells) is not None
    assert stars <= 0.05 * len(simulated)


def test_cell_far_above_the_others_gets_a_star() -> None:
    random = np.random.default_rng(2)
    noise = random.normal(size=(5, 5))
    noise[3] += 20
    cells = table(noise.tolist())
    cells["p"] = heatmaps.differences_from_best(cells)
    assert heatmaps._find_significant_best(cells) == "run 3"
    one_run = table([*noise.tolist(), [0.0]])
    one_run["p"] = heatmaps.differences_from_best(one_run)
    assert heatmaps._find_significant_best(one_run) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "70", None, [70.0]], ids=type)
def test_result_that_is_no_number_is_not_counted(value: Any, tmp_path: Path) -> None:
    sweep = small(seeds=(1,))
    first = sweep.runs()[0]
    finish(sweep, tmp_path, first, value)
    assert summarize_sweep(sweep, tmp_path)["n"].sum() == 0


def diverge(sweep: Sweep, results: Path, name: RunName) -> None:
    folder = run_folder(results, TASKS[sweep.task], name)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"run": str(name), "settings": {}, "metric": "accuracy", "diverged": 40}
    (folder / "result.json").write_text(json.dumps(result))


def test_diverged_runs_are_counted(tmp_path: Path) -> None:
    sweep = small(rows=1, columns=3, panels=1)
    names = sweep.panels[0].names[0]
    for name, seeds in zip(names, ((), (1,), (1, 2))):
        for seed in sweep.seeds:
            run = dataclasses.replace(name, seed=seed)
            if seed in seeds:
                diverge(sweep, tmp_path, run)
            else:
                finish(sweep, tmp_path, run, 70.0)
    cells = summarize_sweep(sweep, tmp_path)
    assert cells["n"].tolist() == [2, 1, 0] and cells["diverged"].tolist() == [0, 1, 2]
    assert cells["mean"].tolist()[:2] == [70.0, 70.0] and math.isnan(cells["mean"][2])
    assert cell_texts(sweep, cells) == [["70.00\n±0.00", "70.00\nn=1", "diverged"]]
    assert heatmaps._title(sweep, cells).endswith("3 of 6 runs finished, 3 diverged.")


def test_published_results_are_shown(tmp_path: Path) -> None:
    sweep = SWEEPS["deit-base"]
    first = sweep.runs()[0]
    finish(sweep, tmp_path, first, 75.0)
    cells = draw_sweep(sweep, tmp_path, tmp_path / "deit-base.png")
    known = cells.set_index("run")["published"].dropna().to_dict()
    assert known == dict(sweep.published) and len(known) == 6
    saved = pd.read_csv(tmp_path / "deit-base.csv").set_index("run")["published"].dropna().to_dict()
    assert saved == pytest.approx(known)
    texts = cell_texts(sweep, cells)
    assert texts[0] == ["75.00\n(76.19)", "(78.59)", "(80.56)"]
    assert texts[1] == ["(81.19)", "(79.61)"]  # the third is not published
    assert heatmaps._find_best(cells) == 0  # published results do not count


def test_runs_of_different_data_are_not_cell_texts(tmp_path: Path) -> None:
    sweep = small()
    for number, run in enumerate(sweep.runs()[:3]):
        finish(sweep, tmp_path, run, 50.0, {} if number == 0 else {"data": f"{number} files"})
    with pytest.raises(CannotDraw, match=r"AdamW\S+ and AdamW\S+ are of different data; use a"):
        draw_sweep(sweep, tmp_path, tmp_path / "small.png")
    assert not list(tmp_path.glob("small*"))


def draw(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    layout = heatmaps._Layout(sweep)
    figure = Figure(figsize=(layout.width, layout.height))
    FigureCanvasAgg(figure)
    heatmaps._draw(figure, sweep, cells, layout)
    return figure


def cell_texts(sweep: Sweep, cells: pd.DataFrame) -> list[list[str]]:
    """Return the texts in the cells of each panel."""
    axes = draw(sweep, cells).axes[: len(sweep.panels)]
    return [[text.get_text() for text in ax.texts if text.get_text()] for ax in axes]


def test_cells_show_mean_std_and_number_of_seeds(tmp_path: Path) -> None:
    sweep = small()
    names = [name for panel in sweep.panels for row in panel.names for name in row]
    values = {0: (70.0, 72.0), 1: (75.0,), 6: (73.0, 74.0)}
    for index, numbers in values.items():
        for seed, value in zip(sweep.seeds, numbers):
            finish(sweep, tmp_path, dataclasses.replace(names[index], seed=seed), value)
    cells = draw_sweep(sweep, tmp_path, tmp_path / "small.png")
    assert cell_texts(sweep, cells) == [["71.00\n±1.41", "75.00\nn=1"], ["73.50\n±0.71"]]
    assert heatmaps._find_best(cells) == 6  # the better mean is of one seed only
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "small.csv", dtype={"row": str, "column": str}), cells, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["cifar100-related", "digits", "clip-vit-b32"])
def test_texts_do_not_overlap(tmp_path: Path, name: str) -> None:
    sweep = SWEEPS[name]
    for number, run in enumerate(sweep.runs()):
        if number % 7:
            finish(sweep, tmp_path, run, 70 + number % 13)
    figure = draw(sweep, summarize_sweep(sweep, tmp_path))
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = []
    for ax in figure.axes:
        labels = [*ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label]
        texts = [*ax.texts, ax._left_title, *(label for label in labels if label.get_visible())]
        boxes += [text.get_window_extent(renderer) for text in texts if text.get_text()]
    boxes += [text.get_window_extent(renderer) for text in figure.texts]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


@pytest.mark.parametrize("done", ["nothing", "one", "equal"])
def test_cells_without_a_run_are_gray(tmp_path: Path, done: str) -> None:
    sweep = small(panels=3)
    count = {"nothing": 0, "one": 1, "equal": None}[done]
    for run in sweep.runs()[:count]:
        finish(sweep, tmp_path, run, 50.0)
    draw_sweep(sweep, tmp_path, tmp_path / "small.png")
    image = (imread(tmp_path / "small.png")[..., :3] * 255).round()
    gray = (np.abs(image - 0.85 * 255) <= 1).all(axis=-1).mean()
    assert (gray > 0.05) == (done != "equal")


@pytest.mark.parametrize(
    ("seeds", "in_heat_maps", "in_curves"),
    [
        (
            (1, 2),
            "Cell: mean ± standard deviation over 2 runs, with the seeds 1, 2. ",
            "Line: mean over 2 runs, with the seeds 1, 2. Band: lowest to highest run.",
        ),
        ((4,), "Cell: one run, with seed 4. ", "Each line is one run, with seed 4."),
    ],
)
def test_figures_say_what_they_average(
    seeds: tuple[int, ...], in_heat_maps: str, in_curves: str
) -> None:
    assert heatmaps._legend(small(seeds=seeds)).startswith(in_heat_maps)
    assert learning_curves._legend(small(seeds=seeds)) == in_curves


def test_curves_are_of_finished_runs_and_say_how_many(tmp_path: Path) -> None:
    sweep = dataclasses.replace(small(1, 1, 1, seeds=(1, 2, 3)), curves=("loss",))
    for seed, run in enumerate(sweep.runs(), 1):
        folder = run_folder(tmp_path, TASKS[sweep.task], run)
        folder.mkdir(parents=True)
        steps = range(20, 60 if seed == 3 else 400, 20)
        (folder / "history.csv").write_text("step,loss\n" + "".join(f"{i},1\n" for i in steps))
        if seed < 3:  # the third one is being trained
            finish(sweep, tmp_path, run, 50.0)
    histories = learning_curves.read_histories(sweep, tmp_path)
    assert set(histories["seed"]) == {1, 2} and histories["step"].max() == 380
    learning_curves.draw_curves(sweep, tmp_path, tmp_path / "curves.svg")
    assert "2 of 3 runs" in (tmp_path / "curves.svg").read_text()


def test_color_scale_leaves_out_a_failed_run() -> None:
    means = np.array([1.0, 74.0, 75.0, 76.0, math.nan])
    norm, is_clipped = heatmaps._color_scale(means)
    assert (norm.vmin, norm.vmax, is_clipped) == (70.0, 76.0, True)
    assert not heatmaps._color_scale(means[1:])[1]
