"""Fused step on the CPU: loops compiled by Numba over chunks that fit into the cache.

A step is limited by memory bandwidth. Each chunk is decayed, updated and its squares summed before the
next one is loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numba.core.config
import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from nnunet_cpr.fused import _cpu_kernels
from nnunet_cpr.fused.backend import COLUMNS, FusedBackend, GroupStep, Rule, sample_stride

CHUNK = 16384
"""Number of elements of a chunk."""
_TASK_CHUNKS = 16
"""Number of chunks that a thread takes at once."""

DTYPES = {
    torch.float32: (np.float32, np.int32(0x7FFFFFFF)),
    torch.float64: (np.float64, np.int64(0x7FFFFFFFFFFFFFFF)),
}
"""NumPy's dtype of parameters, and the mask of all bits but the sign."""

_called: set[tuple[str, Any]] = set()
"""Kernels that this process has called, with the dtypes of their parameters."""
_PROCESS = os.getpid()
_launch_lock = threading.Lock()


class CPUBackend(FusedBackend):
    """Fused step on the CPU, in float32 or float64."""

    dtypes = DTYPES

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(matrices, device)
        self._first_partials = _sizes(tuple(self.sizes), CHUNK)[1]
        self._strides = np.array([sample_stride(numel) for numel in self.sizes], np.int64)
        # Of the chunks of all matrices, and of each matrix.
        self._partials = np.zeros(self._first_partials[-1])
        self._samples = np.zeros(self._first_partials[-1], np.int64)
        self._sums = np.zeros(len(self.matrices))
        self._checks = np.zeros(len(self.matrices), np.int64)

    def _add_partials(self) -> Tensor:
        return torch.from_numpy(self._sums)  # the kernels have added them up

    def _compute_partials(self) -> None:
        for dtype, tables in self._matrix_tables():
            self._run("sum", dtype, tables)

    def _refresh_partials(self) -> bool:
        changed = False
        for dtype, tables in self._matrix_tables():
            kind, magnitude = DTYPES[dtype]
            with _threads(int(tables.first_chunks[-1])) as parallel:
                kernel = "changed_parallel" if parallel else "changed_serial"
                changed |= _call(kernel, kind, (magnitude, tables, self._checks)) > 0
        if changed:
            self._compute_partials()
        return changed

    def _step(
        self,
        launch: GroupStep,
        decay: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if found_inf is not None and bool(found_inf):
            return
        settings = _settings(launch.rule, 1.0 if grad_scale is None else 1.0 / float(grad_scale))
        tables = self._tables(launch.params, launch.matrices, launch.addresses())
        self._run("step", launch.params[0].dtype, tables, settings, decay.numpy())

    def _matrix_tables(self) -> Iterator[tuple[torch.dtype, _cpu_kernels.TableArrays]]:
        """Yield each dtype and the tables of the matrices with this dtype."""
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            indices = [j for j, p in enumerate(self.matrices) if p.dtype == dtype]
            params = [self.matrices[j] for j in indices]
            addresses = [column for p in params for column in (p.data_ptr(), *[0] * (COLUMNS - 1))]
            yield dtype, self._tables(params, indices, addresses)

    def _tables(
        self, params: Sequence[Tensor], matrices: Sequence[int], addresses: Sequence[int]
    ) -> _cpu_kernels.TableArrays:
        numels, first_chunks = _sizes(tuple([p.numel() for p in params]), CHUNK)
        return _cpu_kernels.TableArrays(
            addresses=np.array(addresses, np.int64).reshape(-1, COLUMNS),
            numels=numels,
            matrices=np.array(matrices, np.int32),
            first_chunks=first_chunks,
            first_partials=self._first_partials,
            strides=self._strides,
        )

    def _run(
        self, kernel: str, dtype: torch.dtype, tables: _cpu_kernels.TableArrays, *rest: Any
    ) -> None:
        """Run a kernel on all chunks."""
        kind, magnitude = DTYPES[dtype]
        chunks = int(tables.first_chunks[-1])
        results = self._partials, self._samples, self._sums, self._checks
        args = (chunks, CHUNK, kind(0), magnitude, tables, *results, *rest)
        with _threads(chunks) as parallel:
            if parallel:
                _call(f"{kernel}_parallel", kind, (_TASK_CHUNKS, *args))
            else:
                _call(f"{kernel}_serial", kind, args)


@lru_cache
def _sizes(numels: tuple[int, ...], chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of elements of tensors, and of chunks before each of them and in all."""
    first_chunks = [0, *accumulate(-(-numel // chunk) for numel in numels)]
    return np.array(numels, np.int64), np.array(first_chunks, np.int32)


def _settings(rule: Rule, unscale: float) -> _cpu_kernels.StepSettings:
    return _cpu_kernels.StepSettings(
        adam=rule.adam,
        nesterov=rule.nesterov,
        sign=-1.0 if rule.maximize else 1.0,
        unscale=unscale,
        lr=float(rule.lr),
        beta1=float(rule.beta1),
        beta2=float(rule.beta2),
        eps=float(rule.eps),
    )


def _call(kernel: str, dtype: Any, args: tuple[Any, ...]) -> Any:
    """Call a kernel, which its first call with a dtype compiles or loads from Numba's cache."""
    function = getattr(_cpu_kernels, kernel)
    if (kernel, dtype) in _called:
        return function(*args)
    with _lock_cache(Path(function.stats.cache_path)):
        result = function(*args)
    _called.add((kernel, dtype))
    return result


@contextmanager
def _lock_cache(folder: Path) -> Iterator[None]:
    """Lock Numba's cache against other processes.

    Processes that compile one function for two dtypes at the same time may save both under the same
    name. A later process would run the code of the wrong dtype.
    """
    with ExitStack() as stack:
        # Some network file systems have no locks; the self-check remains.
        with suppress(OSError, NotImplementedError):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(folder / ".compiling.lock"))
        yield


@contextmanager
def _threads(chunks: int) -> Iterator[bool]:
    """Use as many of Numba's threads as torch uses; yield False if one thread is to be used."""
    most = numba.core.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    count = min(torch.get_num_threads(), most)
    forked = os.getpid() != _PROCESS  # Numba aborts if a forked process uses threads
    if count == 1 or chunks <= _TASK_CHUNKS or forked:
        yield False
        return
    with _launch_lock:  # without OpenMP, Numba aborts on concurrent launches
        before = numba.get_num_threads()
        numba.set_num_threads(count)
        try:
            yield True
        finally:
            numba.set_num_threads(before)
