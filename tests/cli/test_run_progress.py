"""Progress of several runs in a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from nnunet_cpr.cli._run_progress import RunProgress

STEPS = {f"SGD_seed{seed}": 100 for seed in range(1, 5)}


class Clock:
    """Clock that the tests set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(progress: RunProgress, name: str, clock: Clock, seconds: float, first: int = 0) -> None:
    progress.start(name)
    for step in range(first, 101):
        progress.update(step, 100)
        clock.seconds += seconds if step < 100 else 0
    progress.end("accuracy 95.00")


def test_log_has_number_and_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(Console(), STEPS, clock=clock) as progress:
        for name in STEPS:
            train(progress, name, clock, 0.1)
    assert capsys.readouterr().out.splitlines() == [
        "run 1 of 4: SGD_seed1",
        "SGD_seed1: accuracy 95.00",
        "run 2 of 4: SGD_seed2, about 0:00:30 left",
        "SGD_seed2: accuracy 95.00",
        "run 3 of 4: SGD_seed3, about 0:00:20 left",
        "SGD_seed3: accuracy 95.00",
        "run 4 of 4: SGD_seed4, about 0:00:10 left",
        "SGD_seed4: accuracy 95.00",
    ]


def test_finished_runs_are_counted_but_not_in_the_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = ["SGD_seed1", "SGD_seed4"]
    with RunProgress(Console(), STEPS, finished, seconds_per_step=2.0, clock=clock) as progress:
        for name in STEPS:
            if name in finished:
                progress.start(name)
                assert not progress.has_trained
                progress.end("accuracy 95.00 (finished before)")
            else:
                train(progress, name, clock, 1.0)
    assert capsys.readouterr().out.splitlines() == [
        "SGD_seed1: accuracy 95.00 (finished before)",
        "run 3 of 4: SGD_seed2, about 0:06:40 left",  # at the speed of the finished runs
        "SGD_seed2: accuracy 95.00",
        "run 4 of 4: SGD_seed3, about 0:01:40 left",  # at the measured speed
        "SGD_seed3: accuracy 95.00",
        "SGD_seed4: accuracy 95.00 (finished before)",
    ]


def test_resumed_steps_do_not_count_as_fast(clock: Clock) -> None:
    with RunProgress(Console(quiet=True), STEPS, clock=clock) as progress:
        train(progress, "SGD_seed1", clock, 1.0, first=90)
        assert progress.seconds_left() == 300
        progress.start("SGD_seed2")
        progress.update(50, 100)
        assert progress.seconds_left() == 250


def test_long_run_prints_a_line_every_ten_minutes(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunProgress(Console(), {"SGD": 100}, clock=clock) as progress:
        train(progress, "SGD", clock, 30.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SGD, step 20 of 100, about 0:40:00 left"
    assert [line.split(",")[1] for line in lines[:-1]] == [
        f" step {step} of 100" for step in (20, 40, 60, 80, 100)
    ]
    assert lines[-1] == "SGD: accuracy 95.00"


def test_terminal_has_one_live_line(clock: Clock) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with RunProgress(console, STEPS, ["SGD_seed1"], clock=clock) as progress:
        train(progress, "SGD_seed2", clock, 1.0)
        progress.start("SGD_seed3")
        progress.update(0, 100)
        progress.update(25, 100)
        assert progress._live is not None and len(progress._live.tasks) == 1
        progress._live.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"run 3 of 4: SGD_seed3 .* 25/100 about 0:02:\d\d left", text)
    assert "SGD_seed2: accuracy 95.00" in text
