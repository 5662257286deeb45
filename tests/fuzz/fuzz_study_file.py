"""Coverage-guided fuzzing of study files: ``python -m tests.fuzz.fuzz_study_file -runs=10000``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["nnunet_cpr.studies.definition"]):
    from tests.helpers.promises import study_file_is_read_or_refused

LINES = [
    *("datasets:", "trainers:", "folds:", "configurations:", "plans:", "name:", "reference:", "source:"),
    *("- trainer:", "  label:", "  group:", "  published:", "    A:", "<<:", "? ", ": ", "- ", "  - "),
]
VALUES = [
    *(
        " Dataset001_A",
        " nnUNetTrainerCPR",
        " [0, 1]",
        " 3d_fullres",
        " ../x",
        " -x",
        " .",
        ' "\\0\\ud800"',
    ),
    *(
        " &a",
        " *a",
        " {a: &b [*b]}",
        " !!python/object:os.system x",
        " !!bool x",
        " !!int ''",
        " 2020-13-45",
    ),
    *(
        " 0x" + "f" * 4000,
        " .nan",
        " .inf",
        " -1",
        " 1e999",
        " |\n  two\n  lines",
        " ~",
        " true",
        "\n",
        "\t",
    ),
    "[" * 20,
]
folder = Path(tempfile.mkdtemp(prefix="fuzz-study-"))


def one_input(data: bytes) -> None:
    """Return lines of study files and other bytes in any order."""
    given = atheris.FuzzedDataProvider(data)
    content = b""
    while given.remaining_bytes():
        kind = given.ConsumeIntInRange(0, 7)
        if kind < 4:
            content += b"\n" + given.PickValueInList(LINES).encode()
        elif kind < 7:
            content += given.PickValueInList(VALUES).encode()
        else:
            content += given.ConsumeBytes(given.ConsumeIntInRange(1, 8))
    study_file_is_read_or_refused(content, folder)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
