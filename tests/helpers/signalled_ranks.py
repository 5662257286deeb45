"""Two ranks that wait for each other under ``watch_signals``, as in a distributed training.

    python -m tests.helpers.signalled_ranks FOLDER

leaves ``FOLDER/pid_<rank>``, and ``FOLDER/written`` once rank 0 has been told to save.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from nnunet_cpr.nnunet.interruption import rank_processes, watch_signals

RANKS = 2


def work(rank: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )

    def write() -> str:
        if rank == 0:
            time.sleep(0.5)
            (folder / "written").touch()
        return "wrote"

    def report(message: str) -> None:
        if rank == 0:
            print(message, flush=True)

    with watch_signals(write, report, rank_processes()):
        temporary = folder / f"temporary_{rank}"
        temporary.write_text(str(os.getpid()))
        temporary.rename(folder / f"pid_{rank}")
        while rank == 0:
            time.sleep(1)
        distributed.barrier()  # for which rank 0 never comes


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(Path(sys.argv[1]),), nprocs=RANKS)
