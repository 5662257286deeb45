"""Time and peak memory of a training's processes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Set
from pathlib import Path

import psutil

from nnunet_cpr._files import finite_number, read_json
from nnunet_cpr.nnunet.fold_files import RESOURCES
from nnunet_cpr.studies.run_state import write_json

_INTERVAL = 5.0
"""Seconds between measurements."""


class ResourceUsage:
    """Seconds and peak memory of a run, over all attempts.

    Args:
        fold: nnU-Net's folder of the run, with the file that earlier attempts have written.
    """

    def __init__(self, fold: Path) -> None:
        self._path = fold / RESOURCES
        self._start = self._next = time.monotonic()
        self._memory = 0
        self._gpu_memory = 0

    def measure(self, pid: int) -> None:
        """Measure the memory of a running child process and its descendants, every five seconds."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        memory = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it has just ended
                info = process.memory_full_info()
                memory += getattr(info, "pss", info.rss)  # shared memory counts once where known
        self._memory = max(self._memory, memory)
        gpu_memory = _gpu_memory({process.pid for process in processes})
        self._gpu_memory = max(self._gpu_memory, gpu_memory)

    def save(self) -> None:
        """Add this attempt to the file of earlier ones."""
        earlier = read_json(self._path) if self._path.exists() else {}
        seconds, memory, gpu_memory = (
            finite_number(earlier.get(key)) or 0
            for key in ("seconds", "peak_memory_bytes", "peak_gpu_memory_bytes")
        )
        usage = {
            "seconds": seconds + time.monotonic() - self._start,
            "peak_memory_bytes": max(memory, self._memory) or None,
            "peak_gpu_memory_bytes": max(gpu_memory, self._gpu_memory) or None,
        }
        write_json(self._path, usage)


def _gpu_memory(pids: Set[int]) -> int:
    """Return the bytes that these processes have on all NVIDIA GPUs; 0 if unknown."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    used = re.findall(r"^(\d+), (\d+)$", answer, re.MULTILINE)  # MiB, "[N/A]" if unknown
    return sum(int(size) * 2**20 for pid, size in used if int(pid) in pids)
