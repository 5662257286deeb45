"""The command ``nnunet-cpr vision``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app, main

runner = CliRunner()
SHORT = "_12steps_warmup2"


def invoke(*arguments: str, status: int = 0) -> str:
    result = runner.invoke(app, ["vision", *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def results(tmp_path: Path) -> str:
    return str(tmp_path / "results")


def test_run_trains_each_name_with_each_seed_once(results: str) -> None:
    names = (f"SGD{SHORT}", f"AdamCPR_ws4{SHORT}")
    arguments = ("run", "digits", *names, "--seeds", "7,9", "--results", results, "--device", "cpu")
    output = invoke(*arguments)
    started = [line.partition(":")[0] for line in output.splitlines() if "12 steps in" in line]
    assert started == [
        *("SGD_warmup2_seed7_12steps", "AdamCPR_ws4_warmup2_seed7_12steps"),
        *("SGD_warmup2_seed9_12steps", "AdamCPR_ws4_warmup2_seed9_12steps"),
    ]
    assert output.splitlines()[-2:] == [f"{results}/digits.csv", f"{results}/digits.png"]
    table = pd.read_csv(Path(results, "digits.csv"))
    assert table["n"].tolist() == [2, 2] and table["mean"].between(5, 100).all()
    assert Path(results, "digits.png").stat().st_size > 5_000
    before = {path: path.stat().st_mtime_ns for path in Path(results).rglob("result.json")}
    assert len(before) == 4 and invoke(*arguments) == output
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_sweep_trains_and_draws_a_file(results: str, tmp_path: Path) -> None:
    names = f"[SGD{SHORT}, SGD_lr1e30{SHORT}]"
    file = tmp_path / "mine.yaml"
    file.write_text(f"task: digits\nseeds: [1, 2]\nmethods:\n  weight decay: {names}\n")
    arguments = ("sweep", str(file), "--results", results, "--seeds", "3-3", "--device", "cpu")
    output = invoke(*arguments, status=1)
    assert "diverged: its loss is not finite" in output
    assert "nnunet-cpr: 1 of 2 runs are not finished, see above" in output
    first = pd.read_csv(Path(results, "mine.csv"))
    assert first["n"].tolist() == [1, 0] and first["diverged"].tolist() == [0, 1]
    assert invoke(*arguments, status=1) == output


def test_warning_is_one_line_without_its_source(
    results: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"nnunet-cpr vision run digits AdamCPR_ws200{SHORT} --device cpu --results"
    monkeypatch.setattr(sys, "argv", [*command.split(), results])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().err == (
        "nnunet-cpr: warning: AdamCPR_ws200_warmup2_seed1_12steps regularizes nothing: no bound is set "
        "before step 200, and it has 12 steps\n"
    )


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nnunet_cpr.vision.load_sweep", interrupt)
    message = "stopped; run the same command again to continue"
    assert invoke("sweep", "mine.yaml", status=130) == f"nnunet-cpr: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "digits", "SGD_seed1"), "SGD_seed1: expected a name without a seed; use seeds or"),
        (("run", "digits", "SGD", "--seeds=1,1"), "--seeds: expected different whole numbers such as"),
        (("run", "grokking", "AdamW_awd"), "add _wd<V>"),
        (("run", "cifar100", "SGD"), "--data is missing: name the folder of CIFAR-100"),
        (("sweep", "nothing.yaml"), "nothing.yaml: No such file or directory"),
    ],
)
def test_error_is_one_line(arguments: tuple[str, ...], message: str, results: str) -> None:
    output = invoke(*arguments, "--results", results, status=1)
    assert message in output and len(output.strip().splitlines()) == 1
    assert not Path(results).exists()
