"""Fused step on the CPU: loops compiled by Numba over chunks that fit into the cache.

A step is limited by memory bandwidth. Each chunk is decayed, updated and its squares summed before the
next one is loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numba.core.config
import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from nnunet_cpr.fused import _cpu_kernels
from nnunet_cpr.fused._memory import Memory
from nnunet_cpr.fused._tables import PARAM, Tables, chunk_count, step_columns
from nnunet_cpr.fused.backend import FusedBackend, GroupStep, Layout, Rule, sample_stride

CHUNK = 16384
"""Number of elements of a chunk."""
_TASK_CHUNKS = 16
"""Number of chunks that a thread takes at once."""

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}

_called: set[tuple[str, np.dtype]] = set()
"""Kernels that this process has called, with the dtypes of their parameters."""
_PROCESS = os.getpid()
_launch_lock = threading.Lock()


class CPUBackend(FusedBackend):
    """Fused step on the CPU, in float32 or float64."""

    dtypes = DTYPES

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(matrices, device)
        counts = [chunk_count(numel, CHUNK) for numel in self.sizes]
        self._first_partials = np.array([0, *accumulate(counts)], np.int32)
        self._strides = np.array([sample_stride(numel) for numel in self.sizes], np.int64)
        self._tables: dict[Any, Tables] = {}
        self._summed: tuple[list[int], list[_Launch]] = [], []  # addresses and launches of all matrices
        self._launches: dict[int, tuple[Layout, list[_Launch]]] = {}  # of each group in the last step
        self._partials = np.zeros(self._first_partials[-1])
        self._samples = np.zeros(self._first_partials[-1])
        self._sums = np.zeros(len(self.matrices))

    def _add_partials(self) -> Tensor:
        return torch.from_numpy(self._sums)  # the kernels have added them up

    def _compute_partials(self) -> None:
        for launch in self._sum_launches():
            self._run("sum", launch, self._partials, self._samples, self._sums)

    def _refresh_partials(self) -> bool:
        changed = [self._run("changed", launch, self._samples) for launch in self._sum_launches()]
        if any(changed):
            self._compute_partials()
        return any(changed)

    def _sum_launches(self) -> list[_Launch]:
        """Return launches on all matrices, one for each dtype."""
        addresses = [p.data_ptr() for p in self.matrices]
        if addresses == self._summed[0]:
            return self._summed[1]
        launches = []
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            indices = [j for j, p in enumerate(self.matrices) if p.dtype == dtype]
            tables = self._new_tables([self.matrices[j].shape for j in indices], indices)
            tables.set_addresses([[addresses[j] for j in indices]])
            launches.append(self._new_launch(dtype, tables))
        self._summed = addresses, launches
        return launches

    def _step(
        self,
        groups: Sequence[GroupStep],
        decay: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if found_inf is not None and bool(found_inf):
            return
        coefficients = decay.numpy()
        unscale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        for index, group in enumerate(groups):
            settings = _settings(group.rule, unscale)
            for launch in self._launches_of(index, group):
                self._run(
                    "step", launch, self._partials, self._samples, self._sums, settings, coefficients
                )

    def _launches_of(self, index: int, group: GroupStep) -> list[_Launch]:
        """Return the launches of a group, one for each dtype."""
        layout, launches = self._launches.get(index, (None, []))
        if layout is group.layout:
            return launches
        launches = []
        dtypes = group.columns[PARAM].distinct_dtypes
        for dtype in dtypes:
            columns, matrices = group.columns, group.matrices
            if len(dtypes) > 1:
                members = [i for i, d in enumerate(columns[PARAM].dtypes) if d == dtype]
                columns = [c.part(members) if c.addresses else c for c in columns]
                matrices = [matrices[i] for i in members]
            tables = self._tables_for((index, dtype), columns, matrices, group.rule.adam)
            launches.append(self._new_launch(dtype, tables))
        self._launches[index] = group.layout, launches
        return launches

    def _tables_for(
        self, key: Any, columns: Sequence[Memory], matrices: list[int], adam: bool
    ) -> Tables:
        shapes = columns[PARAM].shapes
        tables = self._tables.get(key)
        if tables is None or not tables.fits(shapes, matrices):
            tables = self._tables[key] = self._new_tables(shapes, matrices)
        tables.set_addresses(step_columns(columns, adam))
        return tables

    def _new_tables(self, shapes: Sequence[torch.Size], matrices: Sequence[int]) -> Tables:
        return Tables(shapes, matrices, self.device, CHUNK)

    def _new_launch(self, dtype: torch.dtype, tables: Tables) -> _Launch:
        arrays = _cpu_kernels.TableArrays(
            addresses=tables.addresses.numpy(),
            numels=tables.numels.numpy(),
            matrices=tables.matrices.numpy(),
            first_chunks=tables.first_chunks.numpy(),
            first_partials=self._first_partials,
            strides=self._strides,
        )
        return _Launch(tables.chunks, DTYPES[dtype](0), arrays)

    def _run(self, kernel: str, launch: _Launch, *rest: Any) -> Any:
        """Run a kernel on all chunks and return its result."""
        args = (CHUNK, launch.like, launch.tables, *rest)
        with _threads(launch.chunks) as parallel:
            way, first = ("parallel", (_TASK_CHUNKS,)) if parallel else ("serial", ())
            return _call(f"{kernel}_{way}", launch.like.dtype, (*first, launch.chunks, *args))


class _Launch(NamedTuple):
    """Arguments of a kernel that stay the same from step to step.

    Attributes:
        chunks: number of chunks.
        like: 0 of the parameters' dtype.
    """

    chunks: int
    like: np.floating
    tables: _cpu_kernels.TableArrays


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


def _call(kernel: str, dtype: np.dtype, args: tuple[Any, ...]) -> Any:
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
