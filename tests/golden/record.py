"""Write the golden files. Never run it to make a failing test pass.

The files hold what earlier revisions did; a test that fails says that users would notice a change.
Run it once for a new kind of file, or where a change is intended and in the changelog:

    python -m tests.golden.record signatures trainers      # some kinds
    python -m tests.golden.record --version FOLDER         # states and checkpoints of version 0.1.0,
                                                           # whose revision 69f2375 is in the folder
    python -m tests.golden.record folds --version FOLDER   # folds of version 0.3.0, revision 703ccff
"""

from __future__ import annotations

import argparse
import io
import lzma
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.golden.goldens import DATA, write_golden
from tests.golden.optimizer_states import STEPS_BEFORE, Case, Training, cases, continued, old_cases
from tests.golden.tiny_trainer import (
    CHECKPOINTS,
    OLD_CHECKPOINTS,
    continue_checkpoint,
    nnunet_folders,
    write_checkpoint,
)


def record_signatures() -> None:
    """Record the exported names and signatures."""
    from tests.golden.signatures import public_signatures

    write_golden("signatures", public_signatures())


def record_states(version: str = "now", recorded: Iterable[Case] = tuple(cases())) -> None:
    """Record state dicts of optimizers and how the training continues."""
    saved = {case.name: Training(case).run(STEPS_BEFORE).save() for case in recorded}
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    (DATA / "states").mkdir(parents=True, exist_ok=True)
    (DATA / "states" / f"{version}.pth.xz").write_bytes(lzma.compress(buffer.getvalue()))
    found = {case.name: _numbers(continued(case, saved[case.name])) for case in recorded}
    write_golden(f"states/{version}", found)


def record_checkpoints(version: str = "now", names: Iterable[str] = tuple(CHECKPOINTS)) -> None:
    """Record checkpoints of trainers and how the training continues."""
    folder = DATA / "checkpoints" / version
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    with tempfile.TemporaryDirectory() as place, nnunet_folders(Path(place)):
        for name in names:
            write_checkpoint(CHECKPOINTS[name], folder / f"{name}.pth")
            found[name] = _numbers(continue_checkpoint(CHECKPOINTS[name], folder / f"{name}.pth"))
    write_golden(f"checkpoints/{version}", found)


def record_folds() -> None:
    """Record folds of version 0.3.0 and how they continue."""
    from tests.golden.whole_folds import FOLDS, continue_fold, load_fold, write_fold

    folder, found = DATA / "checkpoints" / "0.3.0", {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDS:
        file = folder / f"{name}.pth"
        write_fold(name, file)
        found[name] = {"continued": continue_fold(name, file), "loaded": load_fold(name, file)}
    write_golden("checkpoints/0.3.0", found)


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return tensors as lists of the digits of float32."""
    return {
        key: [_number(x) for x in value.flatten().tolist()] if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def _number(value: float) -> float | str:
    """Return a number as JSON has it, infinity as a word."""
    return float(f"{value:.8g}") if math.isfinite(value) else str(value)


def record_trainers() -> None:
    """Record the settings of trainers by name."""
    from tests.golden.trainer_names import NAMES, described_settings, observed_settings

    with tempfile.TemporaryDirectory() as place, nnunet_folders(Path(place)):
        write_golden("trainers_observed", {name: observed_settings(name) for name in NAMES})
    write_golden("trainers_described", {name: described_settings(name) for name in NAMES})


def record_documented_imports() -> None:
    """Record the names that the documentation imports."""
    from tests.golden.documented_imports import documented_imports

    write_golden("documented_imports", documented_imports())


def record_history() -> None:
    """Record the history of a short training."""
    import tests.conftest  # noqa: F401
    from tests.golden.fold_files import HELD, read_history, train
    from tests.helpers.workspace import make_workspace

    with tempfile.TemporaryDirectory() as place:
        write_golden("history", read_history(train(make_workspace(Path(place)), HELD)))


def record_study_files() -> None:
    """Record the runs of the study files that are shipped."""
    from tests.golden.study_files import STUDIES, TRAINERS, folds_by_training, listed_runs, make_data

    os.environ["nnUNet_extTrainer"] += f"{os.pathsep}{TRAINERS}"
    with tempfile.TemporaryDirectory() as place:
        environment = make_data(Path(place))
        found = {file.stem: folds_by_training(listed_runs(file, environment)) for file in STUDIES}
    write_golden("study_files", found)


def record_reports() -> None:
    """Record the numbers of the reports of the archived studies."""
    from tests.golden.report_numbers import ARCHIVES, report_numbers, unpack, write_report

    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        study = archive.name.removesuffix(".tar.xz")
        with tempfile.TemporaryDirectory() as place:
            unpack(study, Path(place, "results"))
            report = write_report(study, Path(place, "results"), Path(place, "report"))
            write_golden(f"reports/{study}", report_numbers(report))


KINDS = {
    "signatures": record_signatures,
    "documented_imports": record_documented_imports,
    "states": record_states,
    "checkpoints": record_checkpoints,
    "folds": record_folds,
    "trainers": record_trainers,
    "history": record_history,
    "study_files": record_study_files,
    "reports": record_reports,
}


def main() -> None:
    """Record the kinds of the command line, by default those of version 0.1.0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"kinds of files: {', '.join(KINDS)}")
    parser.add_argument("--version", type=Path, metavar="FOLDER", help="revision of an earlier version")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.version is None:
        for kind in arguments.kinds:
            KINDS[kind]()
        return
    folder = arguments.version.resolve()
    sys.path.insert(0, str(folder))
    os.environ["nnUNet_extTrainer"] = str(folder / "trainers")
    import nnunet_cpr

    assert Path(nnunet_cpr.__file__).is_relative_to(folder), nnunet_cpr.__file__
    if arguments.kinds == ["folds"]:
        record_folds()
        return
    record_states("0.1.0", tuple(old_cases()))
    record_checkpoints("0.1.0", OLD_CHECKPOINTS)


if __name__ == "__main__":
    main()
