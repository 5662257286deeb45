"""Commands of docs/how-to/prepare-data.md, from a challenge archive to the report."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nnunet_cpr.nnunet.commands import nnunet_environment
from nnunet_cpr.studies.study_file import load
from tests.helpers import archives

MAKE: dict[str, Callable[[Path], Path]] = {
    "btcv": lambda folder: archives.make_btcv(folder, cases=5),
    "heart": lambda folder: archives.make_decathlon(folder, cases=5),
    "brats2020": lambda folder: archives.make_brats(folder, cases=5),
    "amos22": lambda folder: archives.make_amos(folder, training=(1, 4, 5, 6, 507)),
}
TRAINERS = ["nnUNetTrainerSGD_1epochs_1iters", "nnUNetTrainerCPR_k0p01_1epochs_1iters"]


@pytest.mark.release
@pytest.mark.parametrize("name", list(MAKE))
def test_archive_becomes_a_report(name: str, tmp_path: Path) -> None:
    """Uses the data set of the preset, with trainers of one step."""
    environment = nnunet_environment(tmp_path, processes=1)
    for folder in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        (tmp_path / folder).mkdir()
    source = MAKE[name](tmp_path / "download")
    trainers = TRAINERS if name == "brats2020" else TRAINERS[1:]
    dataset = load(name).datasets[0]
    file = tmp_path / "short.yaml"
    file.write_text(yaml.safe_dump({"datasets": dataset, "folds": [0], "trainers": trainers}))

    command = [sys.executable, "-c", "from nnunet_cpr.cli import main; main()"]
    for arguments in (
        ["prepare", name, str(source), "-np", "1"],
        ["study", "run", str(file), "-np", "1", "--device", "cpu"],
        ["study", "report", str(file)],
    ):
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    report = tmp_path / "nnUNet_results" / "studies" / "short" / "report"
    with open(report / "cases.csv") as opened:
        rows = list(csv.DictReader(opened))
    classes = {"btcv": 13, "heart": 1, "brats2020": 3, "amos22": 15}[name]
    assert len(rows) == classes * len(trainers)  # one case is held out
    assert {row["trainer"] for row in rows} == set(trainers)
    page = (report / "report.html").read_text()
    assert dataset in page and "data:image/" in page
