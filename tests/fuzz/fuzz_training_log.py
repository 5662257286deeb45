"""Coverage-guided fuzzing of training logs: ``python -m tests.fuzz.fuzz_training_log -runs=10000``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["nnunet_cpr.nnunet.fold_files"]):
    from tests.helpers.promises import log_is_read

WORDS = [
    *("\n2026-01-01 10:00:00.0: ", "Epoch ", "Epoch time: ", " s", "train_loss ", "val_loss ", ": "),
    *(
        "Pseudo dice [",
        "np.float32(",
        "0.5",
        "nan",
        "inf",
        "1e999",
        "-1e308",
        "9" * 400,
        "], ",
        ")",
        "٣",
    ),
]
folder = Path(tempfile.mkdtemp(prefix="fuzz-log-"))


def one_input(data: bytes) -> None:
    """Return words of nnU-Net's logs and other bytes in any order."""
    given = atheris.FuzzedDataProvider(data)
    content = b""
    while given.remaining_bytes():
        if given.ConsumeIntInRange(0, 7):
            content += given.PickValueInList(WORDS).encode()
        else:
            content += given.ConsumeBytes(given.ConsumeIntInRange(1, 8))
    log_is_read(content, folder)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
