"""Options of Slurm jobs as users write them, and the script that sbatch gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nnunet_cpr.cli.study.run import RunOptions, gpu_names, parse_minutes
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies import local_and_slurm
from nnunet_cpr.studies.local_and_slurm import Slurm, cancel_slurm_jobs, queued_runs
from nnunet_cpr.studies.state import StudyPaths, state_of
from nnunet_cpr.studies.study import Run

RUNS = [Run("Dataset001_A", "3d_fullres", "nnUNetPlans", fold, "nnUNetTrainerCPR") for fold in (0, 1)]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Return a function that submits runs and returns the options in the script for sbatch."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("sbatch", "echo Submitted batch job 5"), ("srun", ""), ("squeue", "")):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    paths = StudyPaths(tmp_path / "results", tmp_path / "results" / "studies" / "s")

    def submit(*settings: str, **options: Any) -> dict[str, str]:
        slurm = RunOptions(sbatch=list(settings), **options).slurm()
        assert slurm.submit(RUNS, paths, {}) == {RUNS[0].key: "5_0", RUNS[1].key: "5_1"}
        text = (paths.jobs / "5_submission.sh").read_text()
        given = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE)
        assert len(given) == text.count("#SBATCH") == len(dict(given)), "an option is given twice"
        return {**dict(given), "srun": re.findall("^srun .*$", text, re.MULTILINE)[0]}

    return submit


def test_script_has_the_usual_options(script: Callable) -> None:
    given = script(partition="gpu", time="10:00:00", cpus=8, memory="64G", jobs=3)
    expected = {
        **{"partition": "gpu", "time": "600", "cpus-per-task": "8", "mem": "64G", "gpus-per-node": "1"},
        **{"array": "0-1%2", "signal": "USR2@90", "requeue": "", "job-name": "s"},
    }
    assert expected.items() <= given.items()
    assert "--cpus-per-task=8" in given["srun"]


@pytest.mark.parametrize(
    ("settings", "expected", "absent"),
    [
        (("gres=gpu:a100:1",), {"gres": "gpu:a100:1"}, "gpus-per-node"),
        (("gres=scratch:100",), {"gres": "scratch:100", "gpus-per-node": "1"}, "gpus"),
        (("account=me", "constraint=a100|h100"), {"account": "me", "constraint": "'a100|h100'"}, "A"),
        (("--exclusive", "cpus-per-task=4"), {"exclusive": "", "cpus-per-task": "4"}, "cpus_per_task"),
    ],
)
def test_sbatch_options_replace_ours(script: Callable, settings, expected, absent) -> None:
    given = script(*settings)
    assert expected.items() <= given.items() and absent not in given


def test_dependencies_of_user_stage_and_array_hold_together(
    script: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses arrays of more than 1,000 jobs by default."""
    monkeypatch.setattr(local_and_slurm, "_ARRAY_SIZE", 2)
    count = "n=$(cat n 2> /dev/null || echo 0); echo $((n + 1)) > n; echo Submitted batch job 1$n"
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\ncd {tmp_path}\n{count}\n")
    paths = StudyPaths(tmp_path / "results", tmp_path / "results" / "studies" / "s")
    *first, second = (replace(RUNS[0], fold=fold) for fold in range(6))
    slurm = RunOptions(sbatch=["dependency=afterok:7"]).slurm()
    numbers = slurm.submit([second, *first], paths, {}, {second: first[:2]})
    assert [*numbers.values()] == ["10_0", "10_1", "11_0", "11_1", "12", "13"]
    texts = [path.read_text() for path in sorted(paths.jobs.glob("*_submission.sh"))]
    assert [re.findall("--dependency=(.*)", text)[0] for text in texts] == [
        *("afterok:7", "afterok:7,afterany:10", "afterok:7,afterany:11"),
        "afterok:7,afterok:10_0:10_1",
    ]


def test_squeue_is_asked_twice_a_minute(
    script: Callable[..., dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/calls; echo 5_0\n")
    paths = StudyPaths(tmp_path / "results", tmp_path / "results" / "studies" / "s")
    for second in range(0, 60, 2):
        monkeypatch.setattr(local_and_slurm.time, "monotonic", lambda second=second: 3000.0 + second)
        assert queued_runs(paths) == {RUNS[0].key}
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert queued_runs(paths, needed=True) == {RUNS[0].key}
    assert len((tmp_path / "calls").read_text().splitlines()) == 3


def test_times_are_those_of_slurm() -> None:
    times = {"90:30": 91, "24:00:00": 1440, "1-12:30": 2190, "0:00:01": 1}
    assert {text: parse_minutes(text) for text in times} == times
    with pytest.raises(Refusal, match="--time: expected minutes"):
        parse_minutes("1:2:3:4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "1"}, "--time: expected more than the 90 s before its end at which .* got 60 s"),
        ({"sbatch": ["signal=B:USR1@60"]}, "--sbatch signal: .* use --signal-delay"),
        ({"sbatch": ["--time=60"]}, "--sbatch time: .* use --time"),
        ({"sbatch": ["array=0-3"]}, "--sbatch array: .* use --jobs"),
        ({"sbatch": ["dependency=afterok:1?afterok:2"]}, "--sbatch dependency: .* replace '.' by ','"),
    ],
)
def test_jobs_that_could_not_save_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        RunOptions(**options).slurm()
    RunOptions(time="1", signal_delay=10).slurm()


def test_gpus_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count, names in (("2,-1,0", 1, ["2"]), ("1, 0", 2, ["1", "0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert gpu_names(None, None) == names
    assert gpu_names(1, "cuda") == ["1"] and gpu_names(None, "cpu") == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_names(None, None) == ["0", "1"]
    with pytest.raises(Refusal, match="--gpus: expected at most 2 on this machine, got 3"):
        gpu_names(3, None)


def test_slurm_that_does_not_answer_is_no_empty_queue(
    script: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    script()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2\nexit 1\n")
    paths = StudyPaths(tmp_path / "results", tmp_path / "results" / "studies" / "s")
    for ask in (lambda: Slurm().submit(RUNS, paths, {}), lambda: cancel_slurm_jobs(paths)):
        with pytest.raises(Refusal, match="squeue: slurm_load_jobs error: Unable to contact; try"):
            ask()
    assert queued_runs(paths) == frozenset()


def test_refused_jobs_keep_their_failures(script: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path / "results", tmp_path / "results" / "studies" / "s")
    paths.logs.mkdir(parents=True)
    paths.failure(RUNS[0]).write_text("CUDA out of memory\n")
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho Invalid account >&2; exit 1\n")
    with pytest.raises(Refusal, match="sbatch: refused the jobs"):
        Slurm().submit(RUNS, paths, {})
    assert state_of(RUNS[0], paths).reason == "CUDA out of memory"
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 5\n")
    Slurm().submit(RUNS, paths, {})
    assert not paths.failure(RUNS[0]).exists()
