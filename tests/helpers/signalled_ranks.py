"""Two ranks that work together until a signal comes, as in a distributed training.

    python -m tests.helpers.signalled_ranks FOLDER

leaves ``FOLDER/pid_<rank>``, and ``FOLDER/written_<rank>`` once that rank has saved.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from nnunet_cpr.nnunet.processes import Interruption

RANKS = 2


def work(rank: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )

    def write() -> str:
        time.sleep(0.5)
        (folder / f"written_{rank}").touch()
        return "wrote"

    with Interruption(write, print).watched():
        temporary = folder / f"temporary_{rank}"
        temporary.write_text(str(os.getpid()))
        temporary.rename(folder / f"pid_{rank}")
        while True:
            distributed.barrier()
            time.sleep(0.01)


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(Path(sys.argv[1]),), nprocs=RANKS)
