"""Launch of the worker in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers import ROOT
from tests.helpers.client_training import assert_same

WORKER = "tests.helpers.gloo_worker"


def run_in_two_processes(client: str, folder: Path) -> dict[str, Any]:
    """Return the first process's results by method, after comparing them with the second's."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    command = [sys.executable, *launcher, "--module", WORKER, client, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = (torch.load(folder / f"rank{i}.pt", weights_only=True) for i in (0, 1))
    assert_same(second, first)
    return first
