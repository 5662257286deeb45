"""Fused step on the CPU: loops compiled by Numba over chunks that fit into the cache.

A step is limited by memory bandwidth. Each chunk is decayed, updated and its squares summed before the
next one is loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numba.core.config
import numpy as np
import torch
from torch import Tensor

from nnunet_cpr.fused import _cpu_kernels
from nnunet_cpr.fused._memory import Memory
from nnunet_cpr.fused._tables import PARAM, Tables, chunk_count, step_columns
from nnunet_cpr.fused.backend import FusedBackend, GroupStep, Rule

CHUNK = 16384
"""Number of elements of a chunk."""
_TASK_CHUNKS = 16
"""Number of chunks that a thread takes at once."""

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}

_PROCESS = os.getpid()
_launch_lock = threading.Lock()


class CPUBackend(FusedBackend):
    """Fused step on the CPU, in float32 or float64."""

    dtypes = DTYPES

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(matrices, device)
        counts = [chunk_count(numel, CHUNK) for numel in self.sizes]
        self._first_partials = np.array([0, *accumulate(counts)], np.int32)
        self._tables: dict[Any, Tables] = {}
        self._sums = torch.zeros(len(self.matrices), dtype=torch.float64, device="cpu")

    def _add_partials(self) -> Tensor:
        return self._sums

    def _compute_partials(self) -> None:
        partials = self._new_partials()
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            indices = [j for j, p in enumerate(self.matrices) if p.dtype == dtype]
            tables = self._new_tables([self.matrices[j].shape for j in indices], indices)
            tables.set_addresses([[self.matrices[j].data_ptr() for j in indices]])
            self._launch("sum", tables, dtype, partials)
        self._sums = self._sums_from(partials)

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
        partials = self._new_partials()
        updated = np.zeros(len(self.matrices), bool)
        for index, group in enumerate(groups):
            settings = _settings(group.rule, unscale)
            dtypes = list(dict.fromkeys(group.columns[PARAM].dtypes))
            for dtype in dtypes:
                columns, matrices = group.columns, group.matrices
                if len(dtypes) > 1:
                    members = [i for i, d in enumerate(columns[PARAM].dtypes) if d == dtype]
                    columns = [c.part(members) if c.addresses else c for c in columns]
                    matrices = [matrices[i] for i in members]
                tables = self._tables_for((index, dtype), columns, matrices, group.rule.adam)
                self._launch("step", tables, dtype, partials, settings, coefficients, updated)
        if updated.all():
            self._sums = self._sums_from(partials)
        elif updated.any():
            self._sums = torch.where(torch.from_numpy(updated), self._sums_from(partials), self._sums)

    def _new_partials(self) -> np.ndarray:
        """Return zeros for the sums of squares of the chunks of all matrices."""
        return np.zeros(self._first_partials[-1])

    def _sums_from(self, partials: np.ndarray) -> Tensor:
        return torch.from_numpy(_cpu_kernels.sum_partials(self._first_partials, partials))

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

    def _launch(
        self, kernel: str, tables: Tables, dtype: torch.dtype, partials: np.ndarray, *rest: Any
    ) -> None:
        """Run a kernel on all chunks."""
        launch = _cpu_kernels.Launch(
            addresses=tables.addresses.numpy(),
            numels=tables.numels.numpy(),
            matrices=tables.matrices.numpy(),
            first_chunks=tables.first_chunks.numpy(),
            first_partials=self._first_partials,
            partials=partials,
        )
        args = (CHUNK, DTYPES[dtype](0), launch, *rest)
        with _threads(tables.chunks) as parallel:
            if parallel:
                getattr(_cpu_kernels, f"{kernel}_chunks_parallel")(_TASK_CHUNKS, tables.chunks, *args)
            else:
                getattr(_cpu_kernels, f"{kernel}_chunks")(0, tables.chunks, *args)


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
