"""What importing costs and brings along."""

from __future__ import annotations

import subprocess
import sys
import time


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_the_core_needs_torch_alone() -> None:
    heavy = "nnunetv2 batchgenerators SimpleITK pandas matplotlib scipy typer rich"
    code = (
        "import sys, torch; before = set(sys.modules); from nnunet_cpr import *; "
        f"print(*[m for m in {heavy.split()!r} if m in sys.modules and m not in before])"
    )
    assert run(code).strip() == ""


def test_importing_takes_at_most_50_ms_more_than_torch() -> None:
    code = (
        "import torch, time; start = time.perf_counter(); "
        "from nnunet_cpr import CPR, AdamCPR, SGDCPR, KappaWS; print(time.perf_counter() - start)"
    )
    assert min(float(run(code)) for _ in range(5)) < 0.05  # the least disturbed


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from nnunet_cpr import cli; assert 'torch' not in sys.modules; "
        "sys.argv = ['nnunet-cpr', '--help']; cli.main()"
    )
    start = time.perf_counter()
    assert "demo" in run(code)
    assert time.perf_counter() - start < 2


def test_every_public_name_is_there() -> None:
    assert run("import nnunet_cpr as n; print(all(hasattr(n, x) for x in n.__all__))").strip() == "True"
    assert (
        run("import nnunet_cpr as n; print(hasattr(n, 'nothing'), n.__version__)").strip()
        == "False 0.1.0"
    )
