"""Long trainings leak nothing and slow down by nothing, and neither does their record."""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import long_runs
from benchmarks.bars import Bar

STEPS = 3000
Hook = Callable[[torch.optim.Optimizer], None]


def missed(bars: list[tuple[Bar, float]]) -> list[str]:
    return [bar.what for bar, measured in bars if measured > bar.limit]


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Let threads not wait for each other in thousands of short steps, which is slow on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_the_steps_are_those_of_a_training_that_is_regularized() -> None:
    """Otherwise that they leak nothing says nothing."""
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
    """Fresh pages: what the process had once and freed may be handed out again, and shows no growth."""
    kept = mmap.mmap(-1, 8 * STEPS * mmap.PAGESIZE)
    kept_pages = itertools.count()

    def hook(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            kept[next(kept_pages) * mmap.PAGESIZE] = 1

    return hook


def growing_list() -> Hook:
    kept: list[bool] = []

    def hook(optimizer: torch.optim.Optimizer) -> None:
        kept.extend([True] * 5)
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
def test_a_fault_is_found(fault: Callable[[], Hook], found: set[str]) -> None:
    def begin() -> Callable[[], float]:
        optimizer, step = long_runs.training(long_runs.CASES["AdamCPR, adaptive, GradScaler"])
        hook = fault()
        optimizer.register_step_post_hook(lambda optimizer, *_: hook(optimizer))
        return step

    bars = long_runs.long_run(begin, STEPS).bars("run")
    assert {f"run: {what}" for what in found} <= set(missed(bars)), bars


@pytest.mark.slow
def test_a_hundred_thousand_steps_and_a_thousand_epochs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.long_runs", "--check"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0 and "missed" not in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_record_that_is_read_again_every_epoch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_again(history: long_runs.History) -> None:
        for _ in history.epochs:
            long_runs.History.resume(tmp_path, len(history.epochs), history.names)

    monkeypatch.setattr(long_runs.History, "draw", read_again)
    (tmp_path / "cpr_progress.png").touch()
    assert "record of the last epoch, s" in missed(long_runs.record(tmp_path, epochs=150).bars())
