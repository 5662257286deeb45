"""The benchmarks and their limits."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import measure, muon_cost, shapes
from benchmarks.competitors import BASE, COMPETITORS
from benchmarks.limits import Limit, check_limits


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_shapes_match_the_networks() -> None:
    unet = shapes.build("nnU-Net")
    assert round(shapes.elements(unet) / 1e6, 1) == 31.2 and len(unet) == 108
    assert round(shapes.elements(shapes.gpt2()) / 1e6) == 124
    assert round(shapes.elements(shapes.build("nnU-Net ResEnc-L")) / 1e6) == 102


def test_every_optimizer_of_the_cost_of_muon_steps() -> None:
    network = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3) for _ in range(3)))
    for step in muon_cost._steps(network, "cpu").values():
        step()
        pairs = zip(step.model.parameters(), network.parameters())
        assert not any(torch.equal(p, q) for p, q in pairs)


def test_times_are_interleaved_in_random_order() -> None:
    calls: list[str] = []
    actions = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    timings = measure.in_turn(actions, base="a", device="cpu", seconds=0, least=9)
    assert timings["a"].ratio == 1 and {t.rounds for t in timings.values()} == {9}
    rounds = [calls[i : i + 3] for i in range(9, len(calls), 3)]  # after three calls each to warm up
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "always the same order"


def test_host_time_of_gpu_steps_is_close_to_torchs() -> None:
    """Far from the limit: the time of each tensor counts, and not the constant part of a step."""
    pytest.importorskip("triton")
    from benchmarks import host_time

    for family in host_time.OURS:
        assert host_time.host_time(family, 1000, seconds=0.0).ratio < 2 * host_time.MAXIMA[1000]


@pytest.mark.slow
def test_memory_is_that_of_torchs_allocations() -> None:
    """Adam keeps two moments and step counts, SGD one; fused steps allocate almost nothing."""
    square = [("weight", (1000, 1000)), ("bias", (1000,))]
    of = {c.name: c for c in COMPETITORS}
    kept, _ = measure.memory(of["AdamW fused"], square, "cpu")
    assert kept == 2 * 4 * 1_001_000 + 2 * 4
    ours, ours_temporary = measure.memory(of["AdamCPR"], square, "cpu")
    # Bound, multiplier and number of elements of the matrix, and three counters. The sum of squares and
    # the samples for the next step are in NumPy's memory: about 1.6 kB per matrix.
    assert ours - kept == 4 + 4 + 8 + 24
    assert ours_temporary < 100_000
    assert measure.memory(of["SGD as nnU-Net builds it"], square, "cpu")[1] >= 4_000_000


def test_every_competitor_steps() -> None:
    pytest.importorskip("pytorch_cpr")
    for competitor in COMPETITORS:
        if competitor.name == "AMOS" and importlib.util.find_spec("pytorch_optimizer") is None:
            continue
        named = measure.parameters([("weight", (30, 20)), ("bias", (20,))], "cpu")
        for _, p in named:
            p.grad = torch.full_like(p, 1e-3)
        before = named[0][1].detach().clone()
        optimizer = competitor.build(named)
        for _ in range(3):
            optimizer.step()
        assert not torch.equal(named[0][1], before), competitor.name
    assert set(BASE.values()) <= {c.name for c in COMPETITORS}


def test_exceeded_limit_fails_the_check() -> None:
    console = Console(record=True, width=100)
    limit = Limit("ours / theirs", maximum=1.05)
    assert check_limits([(limit, 1.05)], console) and not check_limits(
        [(limit, 1.06), (limit, 1.0)], console
    )
    assert "failed" in console.export_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step_time", "--network", "U"], "unknown network 'U'"),
        (["step_time", "--device", "tpu"], "got 'tpu'"),
        (["large_study", "--command", "new"], "unknown command 'new'"),
    ],
)
def test_wrong_option_is_reported(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_commands_of_a_large_study_keep_their_limits() -> None:
    """A tenth of the full size; the limits are for this size, and none is of wall time."""
    result = run("large_study", "--trainers", "10", "--repeats", "2", "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("passed") == 3 and "50 runs of 1000 epochs" in result.stdout


@pytest.mark.slow
def test_commands_answer_at_once() -> None:
    result = run("command_time", "--repeats", "2", "--check")
    assert result.returncode == 0 and "failed" not in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_end_of_an_epoch_is_measured() -> None:
    """Far from the limit, which needs an idle machine."""
    result = run("epoch_overhead", "--repeats", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    (line,) = (line for line in result.stdout.splitlines() if "default" in line)
    assert 0 < float(line.split("│")[-3]) < 500


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


@pytest.mark.release
def test_train_step_times_nnunet_iterations(tmp_path: Path) -> None:
    short = ("--seconds", "1", "--rounds", "2", "--no-compiled")
    result = run("train_step", *short, "--output", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "train_step_cpu.json").read_text())
    assert len(document["pairs"]) == 2
    assert all(0.9 < ratio < 1.1 for ratio in document["ratio_with_the_rest_shared"].values())
