"""One pass on the CPU: compiled loops over chunks that stay in the processor's cache.

A step moves tens of bytes a parameter and computes little, so what counts is how often the memory is
read. Each chunk is corrected, stepped and measured before the next is touched.
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
from nnunet_cpr.fused.backend import GroupStep, OnePass, Rule

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

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(matrices, device)
        counts = [chunk_count(numel, CHUNK) for numel in self.sizes]
        self._first_partials = np.array([0, *accumulate(counts)], np.int32)
        self._tables: dict[Any, Tables] = {}
        self._sums = torch.zeros(len(self.matrices), dtype=torch.float64, device="cpu")

    def _sums_of_squares(self) -> Tensor:
        return self._sums

    def _measure(self) -> None:
        partials = self._new_partials()
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            these = [j for j, p in enumerate(self.matrices) if p.dtype == dtype]
            tables = self._new_tables([self.matrices[j].shape for j in these], these)  # seldom needed
            tables.locate([[self.matrices[j].data_ptr() for j in these]])
            self._launch("measure", tables, dtype, partials)
        self._sums = self._sums_from(partials)

    def _step(
        self,
        groups: Sequence[GroupStep],
        multiplier: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if found_inf is not None and bool(found_inf):
            return
        coefficients = (2 * multiplier).numpy()
        unscale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        partials = self._new_partials()
        stepped = np.zeros(len(self.matrices), bool)
        for place, group in enumerate(groups):
            settings = _settings(group.rule, unscale)
            dtypes = list(dict.fromkeys(group.columns[PARAM].dtypes))
            for dtype in dtypes:
                columns, matrices = group.columns, group.matrices
                if len(dtypes) > 1:
                    these = [i for i, d in enumerate(columns[PARAM].dtypes) if d == dtype]
                    columns = [c.part(these) if c.addresses else c for c in columns]
                    matrices = [matrices[i] for i in these]
                tables = self._tables_for((place, dtype), columns, matrices, group.rule.adam)
                self._launch("step", tables, dtype, partials, settings, coefficients, stepped)
        if stepped.all():
            self._sums = self._sums_from(partials)
        elif stepped.any():
            self._sums = torch.where(torch.from_numpy(stepped), self._sums_from(partials), self._sums)

    def _new_partials(self) -> np.ndarray:
        """For the sums of squares of all matrices' chunks."""
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
        tables.locate(step_columns(columns, adam))
        return tables

    def _new_tables(self, shapes: Sequence[torch.Size], matrices: Sequence[int]) -> Tables:
        return Tables(shapes, matrices, self.device, CHUNK)

    def _launch(
        self, kernel: str, tables: Tables, dtype: torch.dtype, partials: np.ndarray, *rest: Any
    ) -> None:
        """Run a kernel over all chunks."""
        where = _cpu_kernels.Where(
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
                getattr(_cpu_kernels, f"{kernel}_in_threads")(_SHARE, tables.chunks, *what)
            else:
                getattr(_cpu_kernels, f"{kernel}_chunks")(0, tables.chunks, *what)


def _settings(rule: Rule, unscale: float) -> _cpu_kernels.Settings:
    return _cpu_kernels.Settings(
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
