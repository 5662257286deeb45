"""Leaks and slowdowns of long trainings and of their history."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import long_runs
from benchmarks.limits import Limit

STEPS = 6000
Hook = Callable[[torch.optim.Optimizer], None]


def exceeded(limits: list[tuple[Limit, float]]) -> list[str]:
    return [limit.name for limit, value in limits if value > limit.maximum]


def test_steps_are_regularized() -> None:
    """Without regularization the absence of leaks would prove nothing."""
    for name, case in long_runs.CASES.items():
        optimizer, step = long_runs.training(case)
        (cpr,) = (hook.__self__ for hook in optimizer._optimizer_state_dict_post_hooks.values())
        active = torch.zeros(len(cpr.names), dtype=torch.bool)
        for _ in range(long_runs.WINDOW):
            step()
            active |= cpr.lagrange_multiplier > 0
        assert cpr.step_count == (900 if case.scaled else 1000), name
        assert active.all() and cpr.metrics()["bounded"] == 1, name
        assert cpr.metrics()["skipped_updates"] == 0, name


def kept_tensor() -> Hook:
    kept: list[torch.Tensor] = []
    return lambda optimizer: kept.append(torch.zeros(3))


def kept_number() -> Hook:
    kept: list[float] = []
    return lambda optimizer: kept.append(float(len(kept)))


def kept_when_skipped() -> Hook:
    kept: list[float] = []

    def hook(optimizer: torch.optim.Optimizer) -> None:
        if optimizer.found_inf:
            kept.append(float(len(kept)))

    return hook


def kept_memory() -> Hook:
    """Use new pages: reused memory of the process would show no growth."""
    kept = mmap.mmap(-1, 8 * STEPS * mmap.PAGESIZE)
    kept_pages = itertools.count()

    def hook(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            kept[next(kept_pages) * mmap.PAGESIZE] = 1

    return hook


def growing_list() -> Hook:
    kept: list[bool] = []

    def hook(optimizer: torch.optim.Optimizer) -> None:
        kept.extend([True] * 20)
        sum(kept)

    return hook


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (kept_tensor, {"tensors", "blocks"}),
        (kept_number, {"blocks"}),
        (kept_when_skipped, {"blocks"}),
        (kept_memory, {"MB"}),
        (growing_list, {"aged / new"}),
    ],
)
def test_leak_or_slowdown_is_found(fault: Callable[[], Hook], found: set[str]) -> None:
    def begin() -> Callable[[], float]:
        optimizer, step = long_runs.training(long_runs.CASES["AdamCPR, adaptive, GradScaler"])
        hook = fault()
        optimizer.register_step_post_hook(lambda optimizer, *_: hook(optimizer))
        return step

    limits = long_runs.long_run(begin, STEPS).limits("run")
    assert {f"run: {what}" for what in found} <= set(exceeded(limits)), limits


@pytest.mark.release
@pytest.mark.parametrize("steps", [20_000, 100_000])
def test_long_runs_are_within_limits(steps: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.long_runs", "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_history_that_is_read_every_epoch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_again(history: long_runs.History) -> None:
        for _ in history.epochs:
            long_runs.History.resume(tmp_path, len(history.epochs), history.names)

    monkeypatch.setattr(long_runs, "draw_progress", read_again)
    (tmp_path / "cpr_progress.png").touch()
    assert "record of the last epoch, s" in exceeded(long_runs.record(tmp_path, epochs=150).limits())
