"""Atomic writes, and commands on full or read-only disks."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nnunet_cpr._files import atomic_torch_save, atomic_write
from tests.helpers import archives
from tests.helpers.promises import assert_one_line


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


def test_content_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: happened.append(os.fstat(f).st_ino) or fsync(f))
    monkeypatch.setattr(os, "replace", lambda a, b: happened.append("replaced") or replace(a, b))
    with atomic_write(tmp_path / "a") as temporary:
        temporary.write_text("content")
    assert happened == [(tmp_path / "a").stat().st_ino, "replaced", tmp_path.stat().st_ino]


KILLED = """
import sys, time
from pathlib import Path
from nnunet_cpr._files import atomic_write
with atomic_write(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


def test_stale_temp_files_are_removed_on_next_write(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("before")
    command = [sys.executable, "-c", KILLED, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.kill()
    (left,) = set(os.listdir(tmp_path)) - {"study.yaml"}
    assert file.read_text() == "before"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None and living.stdout.readline() == "writing\n"
        assert left not in os.listdir(tmp_path)
        with atomic_write(file) as temporary:
            temporary.write_text("ours")
        assert len(os.listdir(tmp_path)) == 2, "another process is still writing"
        living.kill()
    assert file.read_text() == "ours"


def test_temp_files_of_other_machines_are_kept_a_day(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    theirs = tmp_path / ".a.1@elsewhere.tmp.json"
    mine = [
        tmp_path / name for name in (".a.json", ".a.old.json", f".ab.9@{socket.gethostname()}.tmp.json")
    ]
    for path in (theirs, *mine):
        path.write_text("")
    os.utime(theirs, (time.time() - 3600,) * 2)
    with atomic_write(file) as temporary:
        temporary.write_text("")
    assert theirs.exists()
    for path in (theirs, *mine):
        os.utime(path, (0, 0))
    with atomic_write(file) as temporary:
        temporary.write_text("")
    assert not theirs.exists() and all(path.exists() for path in mine)


def test_longest_file_names_can_be_written(tmp_path: Path) -> None:
    with atomic_write(tmp_path / ("x" * 251 + ".txt")) as temporary:
        temporary.write_text("content")
    assert os.listdir(tmp_path) == ["x" * 251 + ".txt"]


def test_errors_name_the_target_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "gone"):
        with pytest.raises(OSError, match="txt") as caught, atomic_write(folder / "a.txt") as temporary:
            temporary.write_text("content")
        assert caught.value.filename == str(folder / "a.txt")
    with pytest.raises(FileNotFoundError, match="other"), atomic_write(tmp_path / "b.txt"):
        Path("other.txt").read_text()
    assert os.listdir(tmp_path) == ["file"]


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


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """Fill the small disk."""
    with (small_disk / "full").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
    return small_disk


def test_torch_save_reports_a_full_disk(small_disk: Path) -> None:
    """torch.save alone fails with "unexpected pos 640 vs 598"."""
    file = small_disk / "checkpoint.pt"
    atomic_torch_save({"a": torch.zeros(10)}, file)
    with pytest.raises(OSError, match=r"No space left on device: .*checkpoint\.pt"):
        atomic_torch_save({"a": torch.zeros(10**6)}, file)
    assert os.listdir(small_disk) == ["checkpoint.pt"]
    assert torch.load(file)["a"].shape == (10,)


def cli(*arguments: object, **variables: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("nnUNet_")}
    environment |= {"nnUNet_n_proc_DA": "0", **{key: str(value) for key, value in variables.items()}}
    return subprocess.run(
        [sys.executable, "-c", "from nnunet_cpr.cli import main; main()", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def assert_one_error(done: subprocess.CompletedProcess[str], path: Path) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("nnunet-cpr: ")]
    assert len(errors) == 1 and errors == done.stderr.splitlines()[-1:], done.stderr
    assert_one_line(errors[0])
    assert str(path) in errors[0], errors[0]
    assert "Traceback" not in done.stdout + done.stderr


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_study_new_reports_a_full_disk(full_disk: Path) -> None:
    assert_one_error(cli("study", "new", "btcv", full_disk / "my.yaml"), full_disk / "my.yaml")
    assert below(full_disk) == {"full"}


def test_study_new_reports_invalid_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_error(
        cli("study", "new", "btcv", tmp_path / "file" / "my.yaml"), tmp_path / "file" / "my.yaml"
    )
    assert_one_error(cli("study", "new", "btcv", tmp_path / ("x" * 300)), tmp_path / ("x" * 300))


@pytest.mark.slow
def test_study_report_reports_a_full_disk(full_disk: Path, tmp_path: Path) -> None:
    folders = finished_study(tmp_path)
    study = tmp_path / "toy.yaml"
    assert_one_error(cli("study", "report", study, "-o", full_disk / "r", **folders), full_disk / "r")
    assert below(full_disk) == {"full"}


def finished_study(folder: Path) -> dict[str, Path]:
    """Write ``toy.yaml`` and the results of its fold; return nnU-Net's folders."""
    from tests.helpers.report_folds import both, write_fold

    names = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
    folders = {name: folder / name for name in names}
    for trainer in ("A", "B"):
        write_fold(folders["nnUNet_results"], trainer, 0, {f"c{n}": both(0.1 * n) for n in range(1, 8)})
    (folder / "toy.yaml").write_text("datasets: Dataset001_Toy\ntrainers: [A, B]\nfolds: [0]\n")
    return folders


@pytest.mark.slow
def test_study_run_reports_a_full_disk(full_disk: Path, tmp_path: Path) -> None:
    home = tmp_path / "nnUNet_preprocessed" / "Dataset001_Toy"
    (home / "gt_segmentations").mkdir(parents=True)
    (home / "gt_segmentations" / "a.nii.gz").touch()
    (home / "x").mkdir()
    (home / "x" / "a.pkl").touch()
    (home / "dataset.json").write_text('{"file_ending": ".nii.gz"}')
    (home / "splits_final.json").write_text('[{"train": ["a"], "val": ["a"]}]')
    (home / "nnUNetPlans.json").write_text(
        '{"configurations": {"3d_fullres": {"data_identifier": "x"}}}'
    )
    (tmp_path / "toy.yaml").write_text("datasets: Dataset001_Toy\ntrainers: nnUNetTrainer\nfolds: 0\n")
    folders = {"nnUNet_raw": tmp_path, "nnUNet_preprocessed": home.parent, "nnUNet_results": full_disk}
    place = full_disk / "studies" / "toy" / "study.yaml"
    assert_one_error(cli("study", "run", tmp_path / "toy.yaml", "--device", "cpu", **folders), place)
    assert below(full_disk) == {"full"}


def test_prepare_reports_a_disk_that_becomes_full(small_disk: Path, tmp_path: Path) -> None:
    source = archives.make_btcv(tmp_path, cases=100)
    done = cli("prepare", "btcv", source, "-np", 2, nnUNet_raw=small_disk)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nnunet-cpr: ") and "Dataset017_BTCV" in last, last
    assert "No space left on device" in last
    assert os.listdir(small_disk) == []


def test_prepare_reports_an_invalid_folder(tmp_path: Path) -> None:
    source = archives.make_btcv(tmp_path)
    (tmp_path / "file").write_text("")
    raw = tmp_path / "file" / "nnUNet_raw"
    assert_one_error(cli("prepare", "btcv", source, nnUNet_raw=raw), raw)


@pytest.mark.slow
def test_demo_reports_a_full_disk(full_disk: Path) -> None:
    folder = full_disk / "demo"
    assert_one_error(cli("demo", "--folder", folder), folder)


def test_demo_reports_an_invalid_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_error(cli("demo", "--folder", tmp_path / "file" / "demo"), tmp_path / "file" / "demo")


def test_commands_report_read_only_folders(small_disk: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_one_error(cli("study", "new", "btcv", small_disk / "my.yaml"), small_disk / "my.yaml")
    folders = finished_study(tmp_path)
    assert_one_error(
        cli("study", "report", tmp_path / "toy.yaml", "-o", small_disk, **folders), small_disk
    )
    source = archives.make_btcv(tmp_path)
    assert_one_error(cli("prepare", "btcv", source, nnUNet_raw=small_disk), small_disk)
