"""Results of a study without its checkpoints and predictions, in one small file.

    python -m benchmarks.real_data.archive pack studies/methods.yaml results/methods.tar.xz
    python -m benchmarks.real_data.archive unpack results/*.tar.xz FOLDER

With ``nnUNet_results`` set to the folder, ``nnunet-cpr study report studies/methods.yaml`` writes the
report again, without pictures of cases. HD95 and NSD need the version of MONAI that computed them.

A study that was begun on another machine goes on after ``unpack`` into an empty folder of results:
``nnunet-cpr study run`` then trains the runs that the archive does not have.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.nnunet.fold_files import RESOURCES
from nnunet_cpr.nnunet.history import CSV_NAME
from nnunet_cpr.reports.surface_metrics import CACHE_NAME
from nnunet_cpr.studies.study_file import load

_FOLDERS = ("nnUNet_results", "nnUNet_preprocessed", "nnUNet_raw")

app = typer.Typer(add_completion=False)


@app.command()
def pack(
    study: Annotated[str, typer.Argument(help="Study file.")],
    file: Annotated[Path, typer.Argument(help="Archive to write, .tar.xz.")],
) -> None:
    """Write the metrics of each case, the logs and the histories of the finished runs."""
    results = Path(os.environ["nnUNet_results"])
    definition = load(study)
    contents: dict[str, bytes] = {}
    for run in definition.runs():
        for path in _small_files(run.folder(results)):
            contents[str(path.relative_to(results))] = _without_paths(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz") as archive:
        for name, content in sorted(contents.items()):
            member = tarfile.TarInfo(name)  # without owner and time: equal results give equal files
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    print(f"{len(contents)} files, {file.stat().st_size / 1e6:.2f} MB")


@app.command()
def unpack(
    files: Annotated[list[Path], typer.Argument(help="Archives to read; they may share runs.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write, for nnUNet_results.")],
) -> None:
    """Write the files as nnU-Net's results."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")


def _small_files(fold: Path) -> Iterator[Path]:
    """Yield the small files of a run, none if it has not been validated."""
    summary = fold / "validation" / "summary.json"
    if not summary.is_file():
        return
    yield from (summary, fold.parent / "dataset.json", *sorted(fold.glob("training_log_*.txt")))
    optional = (fold / CSV_NAME, fold / RESOURCES, summary.with_name(CACHE_NAME))
    yield from (path for path in optional if path.is_file())


def _without_paths(path: Path) -> bytes:
    """Return the content of a file without the paths of the machine."""
    text = path.read_text()
    if path.name == "summary.json":
        document = json.loads(text)
        for case in document["metric_per_case"]:
            for key in ("prediction_file", "reference_file"):
                case[key] = Path(case[key]).name
        return json.dumps(document, separators=(",", ":")).encode()
    if path.name == CACHE_NAME:  # belongs to the summary of the archive, whose bytes differ
        summary = path.with_name("summary.json")
        old, new = (
            hashlib.sha256(content).hexdigest()
            for content in (summary.read_bytes(), _without_paths(summary))
        )
        return text.replace(old, new).encode()
    for name in _FOLDERS:
        if folder := os.environ.get(name):
            for spelling in {os.path.abspath(folder), os.path.realpath(folder)}:
                text = text.replace(spelling, name)
    return text.encode()


if __name__ == "__main__":
    app()
