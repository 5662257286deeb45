"""Leaks and slowdowns of long trainings and of their history."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

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


def kept_tensor() -> Hook:
    kept: list[torch.Tensor] = []
    return lambda optimizer: kept.append(torch.zeros(3))


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
def test_long_runs_are_within_limits() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.long_runs", "--steps", "100000"]
    done = subprocess.run(
        [*command, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
