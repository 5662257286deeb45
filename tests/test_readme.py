"""The README's own example."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.helpers import ROOT

README = (ROOT / "README.md").read_text()


def test_the_library_example_trains_a_torchvision_model() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    done = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, check=True)
    loss = float(done.stdout.split()[1])
    metrics = eval(done.stdout.split(maxsplit=2)[2], {"nan": float("nan")})
    assert loss < 2.0  # chance is log(10) = 2.3
    assert metrics["bounded"] == 1 and metrics["active"] > 0
