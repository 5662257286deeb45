"""Shell completion."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import atexit, sys
slow = ("torch", "numpy", "yaml", "pandas", "nnunetv2")
atexit.register(lambda: print([name for name in slow if name in sys.modules], file=sys.stderr))
sys.argv = ["nnunet-cpr"]
from nnunet_cpr.cli import main
main()
"""


@pytest.mark.parametrize(
    ("line", "word"),
    [("nnunet-cpr st", "study"), ("nnunet-cpr study run quick --dry", "--dry-run")],
)
def test_last_word_is_completed_without_slow_imports(line: str, word: str) -> None:
    environment = {
        **os.environ,
        "_NNUNET_CPR_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.stderr == "[]\n", "slow modules are imported, or errors are printed"
    assert [each.split("\t")[0] for each in done.stdout.splitlines()] == [word]
