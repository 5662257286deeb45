"""What importing costs and brings along."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_the_core_adds_little_to_the_import_of_torch() -> None:
    """No other heavy package, and a small part of torch's own processor time."""
    heavy = "nnunetv2 batchgenerators SimpleITK pandas matplotlib scipy typer rich"
    code = (
        "import sys, time; start = time.process_time(); import torch; torchs = time.process_time(); "
        "before = set(sys.modules); import nnunet_cpr as n; "
        "assert all(hasattr(n, name) for name in n.__all__); end = time.process_time(); "
        f"heavy = [m for m in {heavy.split()!r} if m in sys.modules and m not in before]; "
        "print((end - torchs) / (torchs - start), hasattr(n, 'nothing'), n.__version__, *heavy)"
    )
    ratio, *others = run(code).split()
    assert others == ["False", "0.1.0"]
    assert float(ratio) < 0.1


def test_help_does_not_wait_for_torch() -> None:
    code = """
import sys
from nnunet_cpr import cli
sys.argv = ["nnunet-cpr", "--help"]
try:
    cli.main()
finally:
    assert "torch" not in sys.modules
"""
    assert "demo" in run(code)
