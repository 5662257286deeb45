"""The benchmarks and their limits."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.competitors import COMPETITORS


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_published_trainings_are_unpacked_and_compared(tmp_path: Path) -> None:
    """The network that is ahead half way is overtaken by one of two others."""
    half_way_and_end = {
        "ConvolutionalEncoder": (0.8, 0.7),
        "ResidualEncoderM": (0.7, 0.6),
        "ResidualEncoderL": (0.6, 0.8),
    }
    for network, (half_way, end) in half_way_and_end.items():
        folder = tmp_path / "archives" / f"baseline_{network}"
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "Dataset004_Hippocampus.zip", "w") as archive:
            fold = "Dataset004_Hippocampus/3d_fullres/fold_0"
            archive.writestr(f"{fold}/progress.csv", f"ema_fg_dice,Epoch\n0.1,499\n{half_way},500\n")
            summary = json.dumps({"foreground_mean": {"Dice": end}})
            archive.writestr(f"{fold}/validation/summary.json", summary)
    results = tmp_path / "results"
    unpacked = run("published.unpack", str(tmp_path / "archives"), str(results))
    assert unpacked.returncode == 0, unpacked.stderr
    model = results / "Dataset004_Hippocampus" / "nnUNetTrainer__nnUNetResEncUNetLPlans__3d_fullres"
    assert (model / "fold_0" / "validation" / "summary.json").is_file()
    said = run("published.pseudo_dice", str(results)).stdout
    assert "better at the end: 1 of 3 pairs" in said


@pytest.mark.slow
def test_commands_of_a_large_study_keep_their_limits() -> None:
    """A tenth of the full size; the limits are for this size, and none is of wall time."""
    result = run("large_study", "--trainers", "10", "--repeats", "2", "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("passed") == 3 and "50 runs of 1000 epochs" in result.stdout


@pytest.mark.release
def test_commands_answer_at_once() -> None:
    result = run("command_time", "--repeats", "2", "--check")
    assert result.returncode == 0 and "failed" not in result.stdout, result.stdout + result.stderr


@pytest.mark.release
def test_step_time_writes_table_and_figure(tmp_path: Path) -> None:
    for package in ("torchvision", "pytorch_cpr", "pytorch_optimizer"):
        pytest.importorskip(package)
    result = run("step_time", "--network", "ResNet-18", "--seconds", "1", "--output", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "step_time_cpu.json").read_text())
    adam = document["networks"]["ResNet-18"]["Adam"]
    assert set(adam) == {c.name for c in COMPETITORS if c.family == "Adam"}
    # Far from the limits, which need an idle machine: our step is much faster than the authors'.
    assert adam["AdamCPR"]["ratio"] < 0.8 * adam["pytorch-cpr AdamCPR, foreach"]["ratio"]
    assert (tmp_path / "step_time_cpu.png").stat().st_size > 10_000
