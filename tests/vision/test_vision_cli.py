"""``nnunet-cpr vision`` as it is typed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.vision import sweeps, tasks
from nnunet_cpr.vision.names import parse
from nnunet_cpr.vision.sweeps import SWEEPS
from nnunet_cpr.vision.tasks import TASKS

runner = CliRunner()


def invoke(*arguments: str, status: int = 0) -> str:
    result = runner.invoke(app, ["vision", *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def results(tmp_path: Path) -> str:
    return str(tmp_path / "results")


def test_a_run_leaves_its_model_and_is_not_repeated(results: str) -> None:
    arguments = (
        "run",
        "digits",
        "AdamCPR_ws10_24steps_warmup4",
        "--results",
        results,
        "--device",
        "cpu",
    )
    first = invoke(*arguments)
    assert "AdamCPR_ws10_warmup4_24steps: accuracy" in first and "24 steps in" in first
    folder = Path(results, "digits", "AdamCPR_ws10_warmup4_seed1_24steps")
    assert (folder / "model.pt").exists() and not (folder / "checkpoint.pt").exists()
    before = (folder / "result.json").stat().st_mtime_ns
    assert invoke(*arguments) == first
    assert (folder / "result.json").stat().st_mtime_ns == before


def test_a_whole_sweep_is_run_and_drawn(
    results: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    short = dataclasses.replace(TASKS["digits"], steps=12, warmup=2)
    monkeypatch.setitem(tasks.TASKS, "digits", short)
    whole = SWEEPS["digits"]
    monkeypatch.setitem(sweeps.SWEEPS, "digits", dataclasses.replace(whole, seeds=(1,)))
    output = invoke("digits", "--results", results)
    lines = output.splitlines()
    assert sum("accuracy" in line for line in lines) == sum(len(p.names) for p in whole.panels)
    for name in ("digits.png", "digits-curves.png"):
        assert Path(results, name).stat().st_size > 20_000
        assert any(line.endswith(name) for line in lines)
    table = pd.read_csv(Path(results, "digits.csv"))
    assert (table["n"] == 1).all() and table["mean"].between(5, 100).all()
    assert len(table) == len(set(table["run"]))


def test_a_run_that_diverges_does_not_stop_the_others(results: str) -> None:
    names = ("SGD_lr1e30_12steps_warmup0", "SGD_12steps_warmup0")
    output = invoke("run", "digits", *names, "--results", results, "--device", "cpu", status=1)
    assert "failed: the loss of SGD_lr1e30" in output and "SGD_warmup0_12steps: accuracy" in output
    assert "nnunet-cpr: 1 of 2 runs failed, see above" in output


def test_cells_are_runs_by_name() -> None:
    lines = invoke("cells", "cifar100-main").splitlines()
    assert len(lines) == len(SWEEPS["cifar100-main"].cells())
    for line in lines:
        task, name = line.split()
        assert task == "cifar100" and str(parse(name)) == name


def test_dynamics_of_several_runs(results: str, tmp_path: Path) -> None:
    names = ("AdamCPR_ws10_24steps_warmup4", "AdamW_24steps_warmup4")
    missing = invoke("dynamics", "digits", *names, "--results", results, status=1)
    assert f"run: nnunet-cpr vision run digits {names[0]}" in missing
    invoke("run", "digits", *names, "--results", results, "--device", "cpu")
    figure = tmp_path / "both.png"
    invoke("dynamics", "digits", *names, "--results", results, "-o", str(figure))
    assert figure.stat().st_size > 20_000


def test_presets_lists_everything() -> None:
    output = invoke("presets")
    assert all(f"  {name} " in output for name in [*TASKS, *SWEEPS])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "digit", "SGD"), "no task is named 'digit'; there are digits, grokking,"),
        (("run", "digits", "SDG"), "did you mean SGD?"),
        (("run", "digits", "SGD", "--set", "x"), "--set takes KEY=VALUE, not 'x'"),
        (("run", "digits", "SGD", "--device", "nowhere"), "--device nowhere cannot be used"),
        (("run", "digits", "SGD", "SGD_9steps"), "warm-up of 30 steps is not shorter"),
        (("run", "grokking", "AdamW_awd"), "say one with _wd<V>"),
        (("dynamics", "digits", "SGD", "-o", "figure.xyz"), "must be a .png, .pdf or .svg file"),
        (("dynamics", "digits", "SGD", "-o", "nowhere/figure.png"), "in a folder that is there"),
        (("sweep", "nothing"), "no sweep is named 'nothing'; there are digits,"),
        (("run", "cifar100", "SGD"), "say where CIFAR-100 is"),
        (("run", "deit-small", "AdamW"), "say where ImageNet is"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str, results: str) -> None:
    output = invoke(*arguments, *(("--results", results) if arguments[0] == "run" else ()), status=1)
    assert message in output and len(output.strip().splitlines()) == 1
    assert not Path(results).exists()


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from nnunet_cpr import cli_vision; "
        "print([m for m in ('torch', 'timm', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
