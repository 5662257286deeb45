"""One pass on the CPU: compiled loops over chunks that stay in the processor's cache.

A step moves tens of bytes a parameter and computes little, so what counts is how often the memory is
read. Each chunk is corrected, stepped and measured before the next is touched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numba.core.config
import numpy as np
import torch
from torch import Tensor

from nnunet_cpr.kernels import cpu_kernels
from nnunet_cpr.kernels.one_pass import OnePass
from nnunet_cpr.kernels.tables import PARAM, Tables, chunk_count

if TYPE_CHECKING:
    from nnunet_cpr.optim import CPROptimizer

CHUNK = 16384
"""Elements that are stepped before they are measured."""
_SHARE = 16
"""Chunks that a thread takes at once."""

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}

_PROCESS = os.getpid()
_one_launch_at_a_time = threading.Lock()


class CPUPass(OnePass):
    """See the module."""

    dtypes = DTYPES

    def __init__(self, optimizer: CPROptimizer) -> None:
        super().__init__(optimizer)
        counts = [chunk_count(p.numel(), CHUNK) for p in self.matrices]
        self._first_partials = np.array([0, *accumulate(counts)], np.int32)
        self._tables: dict[Any, Tables] = {}
        self._sums = torch.zeros(len(self.matrices), dtype=torch.float64)

    def _sums_of_squares(self) -> Tensor:
        return self._sums

    def _measure(self) -> None:
        partials = self._new_partials()
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            params = [p for p in self.matrices if p.dtype == dtype]
            tables = self._new_tables(params)  # seldom needed, so not kept
            tables.locate([params])
            self._launch("measure", tables, dtype, partials)
        self._sums = self._sums_from(partials)

    def _step(self, multiplier: Tensor) -> None:
        coefficients = (2 * multiplier).numpy()
        found_inf = getattr(self.optimizer, "found_inf", None)  # GradScaler's
        skipped = found_inf is not None and bool(found_inf)
        partials = self._new_partials()
        stepped = np.zeros(len(self.matrices), bool)
        for place, group in enumerate(self.optimizer.param_groups):
            tensors = self.optimizer.step_tensors(group)
            columns = self.columns(tensors)
            settings = self._settings(group)
            dtypes = [] if skipped else list(dict.fromkeys(p.dtype for p in tensors.params))
            for dtype in dtypes:
                own = columns
                if len(dtypes) > 1:
                    these = [i for i, p in enumerate(tensors.params) if p.dtype == dtype]
                    own = [[c[i] for i in these] if c else [] for c in columns]
                tables = self._tables_for((place, dtype), own)
                self._launch("step", tables, dtype, partials, settings, coefficients, stepped)
            self.optimizer.after_step(tensors)
        if stepped.all():
            self._sums = self._sums_from(partials)
        elif stepped.any():
            self._sums = torch.where(torch.from_numpy(stepped), self._sums_from(partials), self._sums)

    def _settings(self, group: dict[str, Any]) -> cpu_kernels.Settings:
        rule = self.optimizer.rule(group)
        grad_scale = getattr(self.optimizer, "grad_scale", None)  # GradScaler's
        return cpu_kernels.Settings(
            adam=rule.adam,
            nesterov=rule.nesterov,
            sign=-1.0 if group["maximize"] else 1.0,
            unscale=1.0 if grad_scale is None else 1.0 / float(grad_scale),
            lr=float(group["lr"]),
            beta1=float(rule.beta1),
            beta2=float(rule.beta2),
            eps=float(rule.eps),
        )

    def _new_partials(self) -> np.ndarray:
        """For the sums of squares of all matrices' chunks."""
        return np.zeros(self._first_partials[-1])

    def _sums_from(self, partials: np.ndarray) -> Tensor:
        return torch.from_numpy(cpu_kernels.sum_partials(self._first_partials, partials))

    def _tables_for(self, key: Any, columns: list[list[Tensor]]) -> Tables:
        params = columns[PARAM]
        tables = self._tables.get(key)
        if tables is None or not tables.fits(params):
            tables = self._tables[key] = self._new_tables(params)
        tables.locate(columns)
        return tables

    def _new_tables(self, params: list[Tensor]) -> Tables:
        matrices = [self.matrix_of.get(id(p), -1) for p in params]
        return Tables(params, matrices, torch.device("cpu"), CHUNK)

    def _launch(
        self, kernel: str, tables: Tables, dtype: torch.dtype, partials: np.ndarray, *rest: Any
    ) -> None:
        """Run a kernel over all chunks."""
        where = cpu_kernels.Where(
            addresses=tables.addresses.numpy(),
            numels=tables.numels.numpy(),
            matrices=tables.matrices.numpy(),
            first_chunks=tables.first_chunks.numpy(),
            first_partials=self._first_partials,
            partials=partials,
        )
        what = (CHUNK, DTYPES[dtype](0), where, *rest)
        with _threads(tables.chunks) as in_threads:
            if in_threads:
                getattr(cpu_kernels, f"{kernel}_in_threads")(_SHARE, tables.chunks, *what)
            else:
                getattr(cpu_kernels, f"{kernel}_chunks")(0, tables.chunks, *what)


@contextmanager
def _threads(chunks: int) -> Iterator[bool]:
    """As many of Numba's threads as torch takes; False where there are none, or nothing to share."""
    most = numba.core.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    count = min(torch.get_num_threads(), most)
    forked = os.getpid() != _PROCESS  # Numba aborts a forked process that comes with threads
    if count == 1 or chunks <= _SHARE or forked:
        yield False
        return
    with _one_launch_at_a_time:  # and, where it has no OpenMP, one in which two of them meet
        before = numba.get_num_threads()
        numba.set_num_threads(count)
        try:
            yield True
        finally:
            numba.set_num_threads(before)
