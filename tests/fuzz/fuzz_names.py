"""Names under a coverage-guided fuzz: ``python tests/fuzz/fuzz_names.py -max_total_time=60``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["nnunet_cpr.naming", "nnunet_cpr.nnunet.names"]):
    from promises import name_is_read_or_refused

    from nnunet_cpr.nnunet import names as trainers
    from nnunet_cpr.vision import names as runs

SUFFIXES = (*trainers.SUFFIXES, *runs.SUFFIXES)
WORDS = [
    *(*trainers.FAMILIES, *runs.FAMILIES),
    *(suffix.before for suffix in SUFFIXES),
    *(suffix.after for suffix in SUFFIXES),
    *("_", "p", "en", "e", "0", "1", "200", "1en3", "0p5", "999999999"),
]


def one_input(data: bytes) -> None:
    """Words of the grammar and any others, in any order."""
    given = atheris.FuzzedDataProvider(data)
    text = ""
    while given.remaining_bytes():
        if given.ConsumeIntInRange(0, 4):
            text += given.PickValueInList(WORDS)
        else:
            text += given.ConsumeUnicode(given.ConsumeIntInRange(1, 6))
    name_is_read_or_refused(text)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
