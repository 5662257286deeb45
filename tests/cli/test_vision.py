"""The command ``nnunet-cpr vision``."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from nnunet_cpr.cli import app, main
from nnunet_cpr.cli import vision as cli_vision
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision import engine, sweeps, tasks
from nnunet_cpr.vision.folder import lock_folder, read_table
from nnunet_cpr.vision.sweeps import SWEEPS, Axis, Panel, Sweep
from nnunet_cpr.vision.tasks import TASKS

runner = CliRunner()


def invoke(*arguments: str, status: int = 0) -> str:
    result = runner.invoke(app, ["vision", *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def results(tmp_path: Path) -> str:
    return str(tmp_path / "results")


def test_run_saves_its_model_and_is_not_repeated(results: str) -> None:
    command = "run digits AdamCPR_ws10_24steps_warmup4 --device cpu --results"
    arguments = (*command.split(), results)
    first = invoke(*arguments)
    assert "AdamCPR_ws10_warmup4_24steps: accuracy" in first and "24 steps in" in first
    folder = Path(results, "digits", "AdamCPR_ws10_warmup4_seed1_24steps")
    assert (folder / "model.pt").exists() and not (folder / "checkpoint.pt").exists()
    assert (folder / "dynamics.png").stat().st_size > 10_000
    before = (folder / "result.json").stat().st_mtime_ns
    assert invoke(*arguments) == first
    assert (folder / "result.json").stat().st_mtime_ns == before


def test_warning_is_one_line_without_its_source(
    results: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "nnunet-cpr vision run digits AdamCPR_ws200_8steps_warmup4 --device cpu --results"
    monkeypatch.setattr(sys, "argv", [*command.split(), results])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().err == (
        "nnunet-cpr: warning: AdamCPR_ws200_warmup4_seed1_8steps regularizes nothing: no bound is set "
        "before step 200, and it has 8 steps\n"
    )


def test_result_without_its_metric_is_one_line(results: str) -> None:
    folder = Path(results, "digits", "SGD_seed1")
    folder.mkdir(parents=True)
    result = {"run": str(TASKS["digits"].complete(parse_run_name("SGD_seed1"))), "settings": {}}
    result |= {"metric": "accuracy", "accuracy": 95.0, "loss": 0.5, "step": 400, "seconds": 2}
    (folder / "result.json").write_text(json.dumps(result))
    command = ("run", "digits", "SGD", "--results", results, "--device", "cpu")
    assert "accuracy 95.00, loss 0.5000, 400 steps in 2 s" in invoke(*command)
    del result["accuracy"]
    (folder / "result.json").write_text(json.dumps(result))
    message = f"{folder / 'result.json'} is damaged; delete it to train the run again"
    assert invoke(*command, status=1).strip() == f"nnunet-cpr: {message}"


@pytest.mark.filterwarnings("ignore:.* regularizes nothing:UserWarning")  # in so few steps
def test_sweep_is_trained_and_drawn(
    results: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "draw_dynamics", lambda runs, path: None)  # slow, and tested elsewhere
    short = dataclasses.replace(TASKS["digits"], steps=12, warmup=2)
    monkeypatch.setitem(tasks.TASKS, "digits", short)
    output = invoke("digits", "--seeds", "5", "--device", "cpu", "--results", results)
    lines = output.splitlines()
    runs = sum(len(panel.names) for panel in SWEEPS["digits"].panels)
    assert sum("accuracy" in line for line in lines) == runs
    started = [line for line in lines if line.startswith("run ")]
    assert len(started) == runs and started[0] == f"run 1 of {runs}: AdamW_wd0_seed5"
    assert all(line.startswith(f"run {i + 1} of {runs}: ") for i, line in enumerate(started))
    assert all("_seed5" in folder.name for folder in Path(results, "digits").iterdir())
    for name in ("digits.png", "digits-curves.png"):
        assert Path(results, name).stat().st_size > 20_000
        assert any(line.endswith(name) for line in lines)
    table = pd.read_csv(Path(results, "digits.csv"))
    assert (table["n"] == 1).all() and table["mean"].between(5, 100).all()
    assert len(table) == len(set(table["run"]))


def test_terminal_has_one_bar_for_all_steps(results: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(cli_vision, "Console", lambda **_: console)
    names = ("SGD_4steps_warmup0", "SGD_4steps_warmup0_seed2")
    invoke("run", "digits", *names, "--results", results, "--device", "cpu")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"run 2 of 2: SGD_warmup0_seed2_4steps .* 100%", text)
    assert text.count("4 steps in") == 2


def test_diverged_run_does_not_stop_the_others(results: str) -> None:
    names = ("SGD_lr1e30_12steps_warmup0", "SGD_12steps_warmup0")
    output = invoke("run", "digits", *names, "--results", results, "--device", "cpu", status=1)
    assert "failed: SGD_lr1e30" in output and "SGD_warmup0_12steps: accuracy" in output
    assert "nnunet-cpr: 1 of 2 runs are not finished, see above" in output


def test_sweep_trains_a_diverged_run_once(results: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "converges": parse_run_name("SGD_12steps_warmup2"),
        "diverges": parse_run_name("SGD_lr1e30_12steps_warmup0"),
    }
    rows, columns = Axis("", tuple(names)), Axis("", ("",))
    panel = Panel("SGD", rows, columns, tuple((name,) for name in names.values()))
    monkeypatch.setitem(sweeps.SWEEPS, "two", Sweep("two", "Two runs", "digits", (panel,), (1,)))
    arguments = ("sweep", "two", "--results", results, "--device", "cpu")
    first = invoke(*arguments, status=1)
    assert "nnunet-cpr: 1 of 2 runs diverged, see above" in first
    table = pd.read_csv(Path(results, "two.csv"))
    assert table["n"].tolist() == [1, 0] and table["diverged"].tolist() == [0, 1]
    monkeypatch.setitem(
        tasks.TASKS,
        "digits",
        dataclasses.replace(TASKS["digits"], setup=lambda options: pytest.fail("trained again")),
    )
    assert invoke(*arguments, status=1) == first


def test_seeds_and_device_are_options_of_every_command_that_trains() -> None:
    group = typer.main.get_command(cli_vision.app)
    options = {
        name: {opt for parameter in command.params for opt in parameter.opts}
        for name, command in group.commands.items()
    }
    training = {name for name, has in options.items() if "--device" in has}
    assert training == {"run", "sweep", "digits", "grokking"}
    assert {name for name, has in options.items() if "--seeds" in has} == {*training, "runs", "draw"}
    helps = {
        (parameter.name, parameter.help)
        for command in group.commands.values()
        for parameter in command.params
        if parameter.name in ("seeds", "device")
    }
    assert len(helps) == 2


def test_run_trains_each_name_with_each_seed(results: str) -> None:
    names = ("SGD_4steps_warmup0", "AdamW_4steps_warmup0")
    arguments = ("--seeds", "7,9", "--results", results, "--device", "cpu", "--drop-model")
    output = invoke("run", "digits", names[0], *arguments)
    assert "run 1 of 2: SGD_warmup0_seed7_4steps" in output
    output = invoke("run", "digits", *names, *arguments)
    started = [line for line in output.splitlines() if line.startswith("run ")]
    assert started == [
        "run 1 of 4: SGD_warmup0_seed7_4steps",
        "run 2 of 4: AdamW_warmup0_seed7_4steps",
        "run 3 of 4: SGD_warmup0_seed9_4steps",
        "run 4 of 4: AdamW_warmup0_seed9_4steps",
    ]


def test_runs_have_the_given_seeds() -> None:
    lines = invoke("runs", "digits", "--seeds", "8,3").splitlines()
    settings = len(SWEEPS["digits"].runs()) // len(SWEEPS["digits"].seeds)
    assert [line.rpartition("_seed")[2] for line in lines] == ["8"] * settings + ["3"] * settings


@pytest.mark.parametrize("text", ["", "1,", "1,1", "-1", "one", "10000000000", "²"])
@pytest.mark.parametrize("command", [("run", "digits", "SGD"), ("grokking",)])
def test_wrong_seeds_are_one_line(command: tuple[str, ...], text: str, results: str) -> None:
    output = invoke(*command, f"--seeds={text}", "--results", results, status=1)
    message = f"--seeds: expected different whole numbers such as 1,2,3, got {text!r}"
    assert output.strip() == f"nnunet-cpr: {message}"
    assert not Path(results).exists()


def test_run_in_use_is_skipped(results: str) -> None:
    names = ("SGD_24steps_warmup4", "SGD_24steps_warmup4_seed2")
    folder = Path(results, "digits", "SGD_warmup4_seed1_24steps")
    folder.mkdir(parents=True)
    arguments = ("--results", results, "--device", "cpu")
    with lock_folder(folder):
        one = invoke("run", "digits", names[0], *arguments, status=1)
        both = invoke("run", "digits", *names, *arguments, status=1)
    message = f"{folder} is in use: another process trains this run"
    assert one.strip() == f"nnunet-cpr: {message}"
    assert f"SGD_warmup4_24steps: skipped: {message}" in both and "_seed2_24steps: accuracy" in both
    assert "nnunet-cpr: 1 of 2 runs are not finished, see above" in both


def test_again_saves_a_model_that_was_dropped(results: str) -> None:
    arguments = ("run", "digits", "SGD_12steps_warmup2", "--results", results, "--device", "cpu")
    model = Path(results, "digits", "SGD_warmup2_seed1_12steps", "model.pt")
    invoke(*arguments, "--drop-model")
    invoke(*arguments)
    assert not model.exists()
    invoke(*arguments, "--again")
    assert model.exists()


@pytest.mark.parametrize("damage", ["empty", "truncated", "no columns"])
@pytest.mark.parametrize("file", ["history.csv", "dynamics.csv"])
def test_damaged_table_is_one_line(damage: str, file: str, results: str, tmp_path: Path) -> None:
    folder = Path(results, "digits", "SGD_seed1")
    folder.mkdir(parents=True)
    (folder / "history.csv").write_text("step,loss,accuracy\n4,0.5,50\n8,0.25,75\n")
    rows = "0,a,0.5,0.1,0\n4,a,0.25,0.1,0.5\n"
    (folder / "dynamics.csv").write_text(f"step,parameter,measure,kappa,multiplier\n{rows}")
    result = {"run": "SGD_seed1", "settings": {}, "metric": "accuracy", "accuracy": 75.0, "loss": 0.25}
    (folder / "result.json").write_text(json.dumps({**result, "step": 8, "seconds": 1.0}))
    draw = ("dynamics", "digits", "SGD", "--results", results, "-o", str(tmp_path / "figure.png"))
    if damage == "empty":  # the undamaged files are drawn
        invoke(*draw)
        (tmp_path / "figure.png").unlink()
    content = (folder / file).read_bytes()
    damaged = {
        "empty": b"",
        "truncated": content[:-3],
        "no columns": content[content.index(b"\n") + 1 :],
    }
    (folder / file).write_bytes(damaged[damage])
    commands = [draw] if file == "dynamics.csv" else [draw, ("draw", "digits", "--results", results)]
    for command in commands:
        output = invoke(*command, status=1)
        message = f"{folder / file} is damaged; train the run again: "
        message += "nnunet-cpr vision run digits SGD_seed1 --again"
        lines = [line for line in output.splitlines() if not line.endswith("digits.png")]
        assert lines == [f"nnunet-cpr: {message}"]
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_table_with_non_finite_numbers_is_drawn(number: str, results: str, tmp_path: Path) -> None:
    """Each column has one such number, each in another row."""
    folder = Path(results, "digits", "SGD_seed1")
    folder.mkdir(parents=True)
    columns = {
        "history.csv": ["step", "loss", "accuracy"],
        "dynamics.csv": ["step", "measure", "kappa", "multiplier"],
    }
    for name, numbers in columns.items():
        rows = [{key: str(row + 1) for key in numbers} for row in range(6)]
        for row, key in zip(rows[1:], numbers):
            row[key] = number
        pd.DataFrame(rows).assign(parameter="a").to_csv(folder / name, index=False)
        read = read_table(folder / name, numbers)
        assert len(read) == 5 and np.isfinite(read["step"]).all()
        assert np.isnan(read[numbers[1:]]).sum().tolist() == [1] * (len(numbers) - 1)
        assert not np.isinf(read[numbers]).any(axis=None)
    figure = tmp_path / "figure.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        invoke("dynamics", "digits", "SGD", "--results", results, "-o", str(figure))
        invoke("draw", "digits", "--results", results)
    assert figure.stat().st_size > 10_000


def test_draw_without_runs_is_refused(results: str) -> None:
    output = invoke("draw", "digits", "--results", results, status=1)
    assert output.startswith(
        f"nnunet-cpr: --results {results}: no runs of digits; run nnunet-cpr vision sweep "
    )
    assert len(output.splitlines()) == 1
    assert not Path(results).exists()


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_vision, "_find_sweep", interrupt)
    message = "stopped; run the same command again to continue"
    assert invoke("sweep", "digits", status=130) == f"nnunet-cpr: {message}\n"


def test_runs_prints_task_and_name() -> None:
    lines = invoke("runs", "cifar100-main").splitlines()
    assert len(lines) == len(SWEEPS["cifar100-main"].runs())
    for line in lines:
        task, name = line.split()
        assert task == "cifar100" and str(parse_run_name(name)) == name


def test_dynamics_draws_several_runs(results: str, tmp_path: Path) -> None:
    names = ("AdamCPR_ws10_24steps_warmup4", "AdamW_24steps_warmup4")
    missing = invoke("dynamics", "digits", *names, "--results", results, status=1)
    assert f"run: nnunet-cpr vision run digits {names[0]}" in missing
    invoke("run", "digits", *names, "--results", results, "--device", "cpu")
    figure = tmp_path / "both.png"
    invoke("dynamics", "digits", *names, "--results", results, "-o", str(figure))
    assert figure.stat().st_size > 20_000


def test_presets_lists_tasks_and_sweeps() -> None:
    output = invoke("presets")
    assert all(f"  {name} " in output for name in [*TASKS, *SWEEPS])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "digit", "SGD"), "unknown task 'digit'; choose from digits, grokking,"),
        (("run", "digits", "SDG"), "did you mean SGD?"),
        (("run", "digits", "SGD", "--set", "x"), "--set: expected KEY=VALUE, got 'x'"),
        (
            ("run", "digits", "SGD", "--set", "x=1"),
            "--set x: unknown setting of digits; it has",
        ),
        (("run", "digits", "SGD", "SGD_9steps"), "warm-up of 20 steps is not shorter"),
        (("grokking", "--device", "nowhere"), "--device nowhere is not usable"),
        (
            ("run", "digits", "SGD", "SGD_seed1", "--seeds", "2"),
            "--seeds 2: expected names without a seed, got SGD_seed1; leave one of them out",
        ),
        (("run", "grokking", "AdamW_awd"), "add _wd<V>"),
        (
            ("dynamics", "digits", "SGD", "-o", "figure.xyz"),
            "figure.xyz: expected a .png, .pdf or .svg file",
        ),
        (("sweep", "nothing"), "unknown sweep 'nothing'; choose from digits,"),
        (("run", "cifar100", "SGD"), "--data is missing: name the folder of CIFAR-100"),
    ],
)
def test_error_is_one_line(arguments: tuple[str, ...], message: str, results: str) -> None:
    output = invoke(*arguments, *(("--results", results) if arguments[0] == "run" else ()), status=1)
    assert message in output and len(output.strip().splitlines()) == 1
    assert not Path(results).exists()


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from nnunet_cpr.cli import vision as cli_vision; "
        "print([m for m in ('torch', 'timm', 'torchvision', 'seaborn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
