"""Executor for this machine: slots of the trainings, environment and options of their commands."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nnunet_cpr.nnunet.processes import StopRequest
from nnunet_cpr.studies import local_and_slurm
from nnunet_cpr.studies.local_and_slurm import Local
from nnunet_cpr.studies.state import StudyPaths, claim, is_running, record_process
from nnunet_cpr.studies.study import Run
from nnunet_cpr.studies.worker import Worker


class FakeTrainings:
    """Short trainings that note their fold, GPU and the number of others at their start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, third: Path | None = None) -> None:
        self.started: list[tuple[int, str | None, int]] = []
        self.running = 0
        self.third = third  # a file to write when the third training ends
        monkeypatch.setattr(Worker, "train", lambda worker, request: self.train(worker, request))

    def train(self, worker: Worker, request: StopRequest) -> bool:
        with claim(worker.run, worker.paths) as ours:
            if ours:
                gpu = worker.environment.get("CUDA_VISIBLE_DEVICES")
                self.started.append((worker.run.fold, gpu, self.running))
                self.running += 1
                time.sleep(0.2)
                self.running -= 1
                if self.third is not None and len(self.started) == 3:
                    self.third.touch()
            return ours


def test_each_run_trains_once_with_a_device_of_its_own(
    run: Run, paths: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = FakeTrainings(monkeypatch)
    runs = [replace(run, fold=fold) for fold in range(5)]
    Local(at_once=2, gpus=["2", "5"]).run(runs, paths, {}, lambda: None)
    assert sorted(fold for fold, _, _ in trainings.started) == [0, 1, 2, 3, 4]
    assert {gpu for _, gpu, _ in trainings.started} == {"2", "5"}
    assert max(others for _, _, others in trainings.started) <= 1


def test_training_of_a_killed_command_is_waited_for_and_continued(
    run: Run, paths: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [replace(run, fold=fold) for fold in range(4)]
    third = paths.results / "third"
    wait = f"while [ ! -e '{third}' ]; do sleep 0.1; done; exit"
    orphan = subprocess.Popen(["sh", "-c", wait, run.trainer])
    threading.Thread(target=orphan.wait).start()  # else it stays a zombie
    runs[3].folder(paths.results).mkdir(parents=True)
    record_process(runs[3], paths, orphan.pid)
    trainings = FakeTrainings(monkeypatch, third)
    Local(at_once=2, gpus=["2", "5"]).run(runs, paths, {}, lambda: None)
    assert [fold for fold, *_ in trainings.started] == [0, 1, 2, 3], "it occupies one of two slots"
    assert len({gpu for _, gpu, _ in trainings.started[:3]}) == 1
    assert not is_running(runs[3], paths)


def test_run_waits_for_those_that_it_needs(
    run: Run, paths: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, first, other = (replace(run, fold=fold) for fold in range(3))
    trainings, done = FakeTrainings(monkeypatch), set()
    monkeypatch.setattr(local_and_slurm, "finished", lambda run, paths: run if run in done else None)
    needed = {second: [first]}

    def show() -> None:
        done.update(first for fold, *_ in trainings.started if fold == 1)

    Local(at_once=2).run([second, first, other], paths, {}, show, needed=needed)
    assert [fold for fold, *_ in trainings.started] in ([1, 2, 0], [2, 1, 0])
    trainings.started.clear()
    done.clear()
    Local(at_once=2).run([second, other], paths, {}, lambda: None, needed=needed)
    assert [fold for fold, *_ in trainings.started] == [2], "what it needs is not done"


def test_cores_are_shared(run: Run, paths: StudyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("OMP_NUM_THREADS", "NNUNET_CPR_CPU_THREADS", "nnUNet_n_proc_DA")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)

    def environment(at_once: int) -> list[str]:
        worker = Local(at_once, device="cpu").worker(run, None, paths, {})
        return [worker.environment[variable] for variable in variables]

    assert environment(at_once=3) == ["2", "2", "2"] and environment(at_once=1) == ["6", "6", "6"]
    monkeypatch.setenv("NNUNET_CPR_CPU_THREADS", "5")
    assert environment(at_once=3) == ["2", "5", "2"]
