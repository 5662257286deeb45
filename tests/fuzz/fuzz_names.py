"""Coverage-guided fuzzing of names: ``python -m tests.fuzz.fuzz_names -max_total_time=60``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["nnunet_cpr.names", "nnunet_cpr.names.trainer_name"]):
    from nnunet_cpr.names import run_name as runs
    from nnunet_cpr.names import trainer_name as trainers
    from tests.helpers.promises import name_is_read_or_refused

SUFFIXES = (*trainers.SUFFIXES, *runs.SUFFIXES)
WORDS = [
    *(*trainers.FAMILIES, *runs.FAMILIES),
    *(suffix.before for suffix in SUFFIXES),
    *(suffix.after for suffix in SUFFIXES),
    *("_", "p", "en", "e", "0", "1", "200", "1en3", "0p5", "999999999"),
]


def one_input(data: bytes) -> None:
    """Return words of the grammar and others in any order."""
    given = atheris.FuzzedDataProvider(data)
    text = ""
    while given.remaining_bytes():
        if given.ConsumeIntInRange(0, 4):
            text += given.PickValueInList(WORDS)
        else:
            text += given.ConsumeUnicode(given.ConsumeIntInRange(1, 6))
    name_is_read_or_refused(text[:255])  # bytes of a folder's name


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
