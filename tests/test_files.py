"""Atomic writes, full disks and read-only folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.files import atomic_directory, atomic_torch_save, atomic_write
from tests.helpers import archives
from tests.reports.folds import both, write_fold


def test_failed_write_leaves_the_file_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("before")
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a.txt"] and file.read_text() == "before"
    with atomic_write(file) as temporary:
        temporary.write_text("after")
        assert (
            temporary.suffix == ".txt" and temporary.parent == tmp_path
        )  # writers choose the format by it
    assert os.listdir(tmp_path) == ["a.txt"] and file.read_text() == "after"


KILLED = """
import sys, time
from pathlib import Path
from nnunet_cpr.files import atomic_directory
with atomic_directory(Path(sys.argv[1])) as folder:
    folder.mkdir()
    print("writing", flush=True)
    time.sleep(600)
"""


def test_directory_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    """One that another process is writing is kept."""
    processes = []
    for name in ("killed", "living"):
        command = [sys.executable, "-c", KILLED, str(tmp_path / name)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None and processes[-1].stdout.readline() == "writing\n"
    killed, living = processes
    killed.kill()
    killed.wait()
    try:
        with atomic_directory(tmp_path / "next") as folder:
            assert len(os.listdir(tmp_path)) == 2
            folder.mkdir()
        assert len(os.listdir(tmp_path)) == 2 and (tmp_path / "next").is_dir()
    finally:
        living.kill()
        living.communicate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if (
        sys.platform != "linux"
        or os.geteuid()
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("only root can mount a small disk, and not in every container")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_torch_save_reports_a_full_disk(small_disk: Path) -> None:
    """torch.save alone fails with "unexpected pos 640 vs 598"."""
    file = small_disk / "checkpoint.pt"
    atomic_torch_save({"a": torch.zeros(10)}, file)
    with pytest.raises(OSError, match=r"No space left on device: .*checkpoint\.pt"):
        atomic_torch_save({"a": torch.zeros(10**6)}, file)
    assert os.listdir(small_disk) == ["checkpoint.pt"]
    assert torch.load(file)["a"].shape == (10,)


def assert_one_error(path: Path, *arguments: object) -> None:
    """Check that a command ends with one line, which has the path."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 1, done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("nnunet-cpr: ")]
    assert len(errors) == 1 and errors == done.stderr.splitlines()[-1:], done.stderr
    assert str(path) in errors[0], errors[0]


def test_commands_report_read_only_folders(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trainer in ("A", "B"):
        write_fold(tmp_path, trainer, 0, {f"c{n}": both(0.1 * n) for n in range(1, 8)})
    (tmp_path / "toy.yaml").write_text("datasets: Dataset001_Toy\ntrainers: [A, B]\nfolds: [0]\n")
    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    monkeypatch.setenv("nnUNet_raw", str(small_disk))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_one_error(small_disk / "my.yaml", "study", "new", "btcv", small_disk / "my.yaml")
    assert_one_error(small_disk, "study", "report", tmp_path / "toy.yaml", "-o", small_disk)
    assert_one_error(small_disk, "prepare", "btcv", archives.make_btcv(tmp_path))
