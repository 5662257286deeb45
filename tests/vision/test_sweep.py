"""Sweeps in YAML files, their tables and figures, and the results that come with the source."""

from __future__ import annotations

import json
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.vision.sweep import Sweep, draw_summary, load_sweep, read_results, summarize
from nnunet_cpr.vision.tasks import TASKS
from nnunet_cpr.vision.training import run_folder
from tests.helpers import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.vision import compare

SWEEPS = sorted(
    path for path in (ROOT / "benchmarks/vision").glob("*.yaml") if path != compare.COMPARISONS
)
METHODS = {"AdamW": ["AdamW_wd0p1", "AdamW_wd1"], "CPR": ["AdamCPR"]}
SWEEP = Sweep(task="cifar10", methods=METHODS, seeds=[1, 2, 3])


def write_results(results: Path, numbers: dict[str, list[tuple[float, float] | None]]) -> None:
    """Write validation and test accuracy of each run's seeds; None is a diverged run."""
    for name, values in numbers.items():
        for seed, value in enumerate(values, 1):
            run = parse_run_name(f"{name}_seed{seed}")
            folder = run_folder(results, TASKS["cifar10"], run)
            folder.mkdir(parents=True)
            result = {"run": str(run), "task": "cifar10", "seconds": 1.0}
            if value is None:
                result["diverged"] = 3
            else:
                result |= {"validation_accuracy": value[0], "accuracy": value[1], "loss": 1.0, "step": 9}
            (folder / "result.json").write_text(json.dumps(result))


# Files


@pytest.mark.parametrize("file", SWEEPS, ids=[path.stem for path in SWEEPS])
def test_sweep_of_the_benchmarks_is_complete(file: Path) -> None:
    sweep = load_sweep(file)
    runs = [TASKS[sweep.task].complete(run) for run in sweep.runs()]
    assert len(set(runs)) == len(runs)
    compared = yaml.safe_load(compare.COMPARISONS.read_text()).get(file.stem, {})
    assert {*compared, *compared.values()} <= set(sweep.methods)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods: {SGD: [SGD]}", "task: expected this entry, got none"),
        (
            "task: digits\nmethods: {SGD: [SGD]}\nseed: 1",
            "unknown entry 'seed'; choose from seeds",
        ),
        ("task: digits\nmethods: {SGD: [SGD]}\nmethods: {}", "duplicate key 'methods'"),
        ("task: digits\nmethods: {SGD: SGD}", "methods.SGD: expected a valid list, got 'SGD'"),
        ("task: digits\nmethods: {SGD: [SGD]}\nseeds: 3", "for 3 seeds write 1-3"),
        ("- digits", "expected a mapping with entries such as task, methods, seeds"),
    ],
)
def test_file_that_is_not_a_sweep_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(Refusal, match=r"mine\.yaml: ") as error:
        load_sweep(tmp_path / "mine.yaml")
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_seeds_of_a_sweep_are_a_list_or_a_range(tmp_path: Path) -> None:
    for written, seeds in (("1-3", [1, 2, 3]), ("[2, 4]", [2, 4]), ("2,5-6", [2, 5, 6])):
        text = f"task: digits\nmethods: {{SGD: [SGD]}}\nseeds: {written}\n"
        (tmp_path / "mine.yaml").write_text(text)
        assert load_sweep(tmp_path / "mine.yaml").seeds == seeds


# Table and figure


def test_table_has_mean_interval_and_numbers_of_runs(tmp_path: Path) -> None:
    values = [70.0, 71.0, 73.0]
    numbers = {"AdamW_wd0p1": [(0, x) for x in values], "AdamW_wd1": [None, (0, math.nan), (0, 60.0)]}
    write_results(tmp_path, numbers)
    table = summarize(SWEEP, tmp_path).set_index("run")
    assert list(table["n"]) == [3, 1, 0] and list(table["diverged"]) == [0, 1, 0]
    first = table.loc["AdamW_wd0p1"]
    expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (first["low"], first["high"]) == pytest.approx(expected)
    assert first["mean"] == pytest.approx(np.mean(values))
    assert first["std"] == pytest.approx(np.std(values, ddof=1))
    assert table.loc["AdamW_wd1", "mean"] == 60
    assert table.loc["AdamW_wd1", ["std", "low"]].isna().all()
    assert math.isnan(table.loc["AdamCPR", "mean"])
    draw_summary(table.reset_index(), "accuracy", tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    for name in ("AdamW_wd0p1", "AdamW_wd1, n = 1, diverged", "AdamCPR, n = 0", "AdamW", "CPR"):
        assert f"<!-- {name} -->" in text


# Comparison of methods


def test_setting_is_chosen_by_validation_and_compared_on_test_data(tmp_path: Path) -> None:
    tests, others = (70.0, 71.0, 73.0), (74.0, 75.0, 75.5)
    write_results(
        tmp_path,
        {
            "AdamW_wd0p1": [(80.0, value) for value in tests],  # best on validation, not on test data
            "AdamW_wd1": [(79.0, 90.0)] * 3,
            "AdamCPR": [(10.0, value) for value in others],
        },
    )
    table = compare.compare_methods(read_results(SWEEP, tmp_path), {"CPR": "AdamW"})
    assert table["run"].tolist() == ["AdamW_wd0p1", "AdamCPR"]
    assert table["mean"].tolist() == pytest.approx([np.mean(tests), np.mean(others)])
    assert table["difference"][1] == pytest.approx(np.mean(others) - np.mean(tests))


@pytest.mark.parametrize(
    ("archive", "sweep", "seeds", "method", "numbers"),
    [
        ("cifar10", "cifar10", 5, "Muon + CPR, default", [1.168, -0.090, 2.425, 0.965]),
        ("cifar10", "cifar10-long", 10, "SGD + CPR", [2.566, 1.502, 3.630, 0.001]),
        ("text", "text", 3, "Adam + CPR, 600 steps", [-1.873, -2.704, -1.043, 0.045]),
    ],
)
def test_results_that_come_with_the_source_give_the_numbers_of_the_docs(
    archive: str,
    sweep: str,
    seeds: int,
    method: str,
    numbers: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tarfile.open(ROOT / f"benchmarks/vision/results/{archive}.tar.xz") as results:
        results.extractall(tmp_path, filter="data")
    file = str(ROOT / f"benchmarks/vision/{sweep}.yaml")
    monkeypatch.setattr(sys, "argv", ["compare", file, "--results", str(tmp_path)])
    compare.main()
    table = pd.read_csv(tmp_path / f"{sweep}-methods.csv").set_index("method")
    assert table["n"].eq(seeds).all()
    found = table.loc[method, ["difference", "low", "high", "p"]].tolist()
    assert found == pytest.approx(numbers, abs=0.001, nan_ok=True)
