"""Launcher for scripts like timm's ``train.py``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnunet_cpr.integrations import timm_train
from tests.helpers import ROOT
from tests.helpers.pages import blocks

DOCUMENTED = [
    " ".join(command.replace("\\\n", " ").split())
    for block in blocks(ROOT / "docs/reference/paper-experiments.md")
    for command in block.code.split("\n\n")
    if "timm_train train.py" in command
]

SCRIPT = """
import argparse, json, sys
import timm
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.utils import ParseKwargs
import helper  # in the folder of the script

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--model")
parser.add_argument("--opt", default="sgd")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--weight-decay", type=float, default=2e-5)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--opt-kwargs", nargs="*", default={}, action=ParseKwargs)


def main():
    args, _ = parser.parse_known_args()
    model = timm.create_model(args.model, img_size=32, depth=1)
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args), **args.opt_kwargs)
    found = {"kappa": repr(optimizer.cpr.bound), "names": optimizer.cpr.names, "data": args.data}
    open(helper.RESULT, "w").write(json.dumps({**found, "argv": sys.argv, "file": __file__}))


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", DOCUMENTED, ids=["DeiT-S", "CLIP"])
def test_documented_command_builds_its_optimizer(command: str, tmp_path: Path) -> None:
    """Launch one process of it, with a script that ends before the training."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(f"RESULT = {str(tmp_path / 'result.json')!r}\n")
    torchrun = "python -m torch.distributed.run --standalone"
    words = command.replace("torchrun --nproc-per-node 4", torchrun).split()
    done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    (given,) = re.findall(r"kappa=ws(\d+)", command)
    assert found["kappa"] == f"KappaWS(steps={given})" and found["data"] == "DIR"
    assert "blocks.0.attn.qkv.weight" in found["names"] and "pos_embed" not in found["names"]
    assert found["file"] == found["argv"][0] == "train.py"


def test_launcher_without_a_script_prints_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["timm_train", "none.py"])
    with pytest.raises(SystemExit, match=r"^timm_train: script 'none\.py' does not exist; usage: "):
        timm_train.main()
