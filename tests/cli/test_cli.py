from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from nnunet_cpr import __version__
from nnunet_cpr.cli import app
from nnunet_cpr.cli.errors import report_errors
from nnunet_cpr.demo import run_demo
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.nnunet.commands import run
from tests.helpers import ROOT

runner = CliRunner()


def test_version_is_printed() -> None:
    assert runner.invoke(app, ["--version"]).stdout.strip() == __version__


def test_path_of_an_error_has_the_variable_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    with pytest.raises(typer.Exit), report_errors():
        (tmp_path / "studies").rmdir()
    said = f"nnunet-cpr: nnUNet_results: {tmp_path}/studies: No such file or directory\n"
    assert capsys.readouterr().err == said


def test_doctor_finds_no_problem_here() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for subject in (
        f"nnunet-cpr: {__version__}",
        "torch:",
        "nnU-Net:",
        f"trainers: {len(FAMILIES) + 1} found by nnU-Net",
        "open  nnUNet_raw: not set",
    ):
        assert subject in result.output


@pytest.mark.parametrize("command", ["trainers", "doctor"])
def test_interrupt_of_any_command_has_its_status(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.console.Console.print", interrupt)
    monkeypatch.setattr("nnunet_cpr.nnunet.tools.doctor.check_installation", interrupt)
    result = runner.invoke(app, [command])
    assert (result.exit_code, result.stderr) == (130, "nnunet-cpr: stopped\n")


def test_explanation_is_printed_as_json() -> None:
    name = "nnUNetTrainerTimmCPR_lion_ws2000"
    found = json.loads(runner.invoke(app, ["trainers", name, "--json"]).stdout)
    assert found["optimizer"].startswith("Lion(") and "step 2,000" in found["bound"]


def test_suffixes_are_listed_with_the_families_that_take_them(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    lines = runner.invoke(app, ["trainers"]).stdout.splitlines()
    listed = [tuple(re.split(r"\s{2,}", line.strip())) for line in lines if line.startswith(" _")]
    page = (ROOT / "docs" / "reference" / "trainer-names.md").read_text()
    rows = re.findall(r"^\| `(_\S+)` \| (.+?) \| (.+?) \|$", page.split("begin suffixes")[1], re.M)
    assert listed == rows
    assert ("_momentum<V>", "CPR, MuonCPR, SGD, Muon, Timm, TimmCPR", "momentum below 1") in listed


def test_optimizers_of_timm_are_listed_with_reasons_against_some() -> None:
    lines = runner.invoke(app, ["trainers", "nnUNetTrainerTimm"]).stdout.splitlines()
    assert any("nnUNetTrainerTimm_lion " in line for line in lines)
    assert any(
        "nnUNetTrainerTimm_adahessian" in line and "no: it needs second" in line for line in lines
    )


def test_doctor_remedies_missing_trainers(monkeypatch) -> None:
    monkeypatch.delenv("nnUNet_extTrainer")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "run: pip install --force-reinstall --no-deps " in result.output
    assert "1 problem found" in result.output


def test_doctor_remedies_an_old_nnunet_and_a_torch_that_cannot_be_imported(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.7.0")
    said = runner.invoke(app, ["doctor"]).output
    assert "wrong nnU-Net: 2.7.0, too old\n      run: pip install --upgrade 'nnunetv2>=2.8.0'" in said
    monkeypatch.setitem(sys.modules, "nnunet_cpr.nnunet.tools.doctor", None)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1
    assert result.output.endswith("; run: pip install --upgrade --force-reinstall nnunet_cpr\n")


def test_doctor_remedies_a_missing_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("nnUNet_raw", str(tmp_path / "gone"))
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1 and f"run: mkdir -p {tmp_path / 'gone'}" in result.output


def test_doctor_finds_swapped_and_unwritable_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, other in (
        ("raw", "gt_segmentations"),
        ("preprocessed", "imagesTr"),
        ("results", "a__b__c"),
    ):
        (tmp_path / name / "Dataset901_A" / other).mkdir(parents=True)
        monkeypatch.setenv(f"nnUNet_{name}", str(tmp_path / name))

    def refuse(dir: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    said = runner.invoke(app, ["doctor"]).output
    raw, preprocessed = tmp_path / "raw", tmp_path / "preprocessed"
    assert f"nnUNet_raw: {raw} has the files of nnUNet_preprocessed\n" in said
    assert f"run: export nnUNet_raw={preprocessed}\n" in said
    assert f"run: export nnUNet_preprocessed={raw}\n" in said
    assert f"nnUNet_results: {tmp_path}/results cannot be written: Read-only file system\n" in said
    raw.rename(tmp_path / "kept")
    preprocessed.rename(raw)
    (tmp_path / "kept").rename(preprocessed)
    assert "1 problem found" in runner.invoke(app, ["doctor"]).output  # those of others may be read-only


def test_interrupt_kills_the_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import os, time, pathlib; "
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )

    def interrupt(process: int) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([Path(sys.executable).name, "-c", code], tmp_path / "log", {}, on_wait=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.slow
def test_demo_into_a_file_prints_a_line_for_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nnunet_cpr.demo.run", stop)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, Console(file=io.StringIO()))
    stages = ["generating 10 phantoms and an unseen one", "planning and preprocessing"]
    assert capsys.readouterr().out.splitlines() == stages


SHORT_DEMO = """
from nnunet_cpr import cli, demo

def shorten(name):
    return name.replace("ws70", "k0p01").replace("warmup30_3epochs_70iters", "warmup3_1epochs_7iters")

demo.TRAINERS = {shorten(name): label for name, label in demo.TRAINERS.items()}
cli.main()
"""
WHOLE_DEMO = str(Path(sys.executable).parent / "nnunet-cpr")


@pytest.mark.parametrize(
    ("command", "steps", "least"),
    [
        pytest.param(
            [sys.executable, "-c", SHORT_DEMO], 7, (0, 0), marks=pytest.mark.release, id="short"
        ),
        pytest.param([WHOLE_DEMO], 210, (0.6, 0.5), marks=pytest.mark.release, id="whole"),
    ],
)
def test_demo_prints_a_table_and_keeps_figures(
    command: list[str], steps: int, least: tuple[float, float], tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    command = [*command, "demo", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if "Adam +" in line and "│" in line]
    table = {row[1].strip(): [float(cell) for cell in row[2:6]] for row in rows}
    assert set(table) == {"Adam + CPR", "Adam + weight decay"}
    for validation, unseen, trained, _seconds in table.values():
        assert least[0] <= validation <= 1 and least[1] <= unseen <= 1 and trained == steps
    assert len(list(folder.rglob("cpr_progress.png"))) == 1
    assert [f.name for f in tmp_path.iterdir()] == ["demo"]
