"""Time and peak memory of a training's processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Set
from pathlib import Path

import psutil

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.fold_files import RESOURCES, measurement
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
        self._start = time.monotonic()
        self._next = 0.0
        self._memory = 0
        self._gpu_memory = 0

    def measure(self, pid: int) -> None:
        """Measure the memory of a process and its descendants, more seldom the longer they run."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + min(_INTERVAL, 0.2 + now - self._start)
        processes = []
        with contextlib.suppress(psutil.Error):
            processes = [root := psutil.Process(pid), *root.children(recursive=True)]
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
        before = self._read()
        memory = max(self._memory, before.get("peak_memory_bytes", 0))
        gpu_memory = max(self._gpu_memory, before.get("peak_gpu_memory_bytes", 0))
        usage = {
            "seconds": before.get("seconds", 0.0) + time.monotonic() - self._start,
            "peak_memory_bytes": memory or None,
            "peak_gpu_memory_bytes": gpu_memory or None,
        }
        write_json(self._path, usage)

    def _read(self) -> dict[str, float]:
        """Return the valid numbers of earlier attempts."""
        try:
            entries = dict(read_json(self._path))
        except (OSError, ValueError, TypeError):
            return {}
        numbers = {key: measurement(value) for key, value in entries.items()}
        return {key: number for key, number in numbers.items() if number is not None}


def _gpu_memory(pids: Set[int]) -> int:
    """Return the bytes that these processes have on all NVIDIA GPUs; 0 if unknown."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return sum(
            process.usedGpuMemory or 0  # None where the driver does not tell
            for index in range(pynvml.nvmlDeviceGetCount())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByIndex(index)
            )
            if process.pid in pids
        )
    except pynvml.NVMLError:
        return 0
