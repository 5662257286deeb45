"""Tables of addresses, sizes and chunks of the tensors that a kernel launch accesses."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nnunet_cpr._device import to_device
from nnunet_cpr.fused._memory import Memory

PARAM, GRAD, FIRST, SECOND, LARGEST, STEP = range(6)
"""Columns of the table of addresses; FIRST is SGD's momentum or Adam's first moment."""
COLUMNS = 6


class Tables:
    """Tables of the n tensors of one kernel launch, on their device.

    Attributes:
        addresses: int64 ``[n, COLUMNS]``, 0 for missing state.
        numels: number of elements of each tensor, int64 ``[n]``.
        matrices: matrix index j of each tensor, -1 if it is not regularized, int32 ``[n]``.
        first_chunks: index of each tensor's first chunk, and the number of chunks, int32 ``[n + 1]``.
        chunks: number of chunks.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], matrices: Sequence[int], device: torch.device, chunk: int
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        chunks = [chunk_count(numel, chunk) for numel in numels]
        self._key = (list(shapes), list(matrices))
        self.device = device
        self.chunks = sum(chunks)
        self.numels = to_device(numels, torch.int64, device)
        self.matrices = to_device(matrices, torch.int32, device)
        self.first_chunks = to_device([0, *accumulate(chunks)], torch.int32, device)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        self.rows: list[int] = []
        self._columns: Sequence[Sequence[int]] = ()

    def fits(self, shapes: Sequence[torch.Size], matrices: Sequence[int]) -> bool:
        """Return True if the tables were built for these shapes and matrix indices."""
        return self._key == (shapes, matrices)

    def set_addresses(self, columns: Sequence[Sequence[int]]) -> None:
        """Set the addresses of the tensors by column; an empty column means missing state.

        The tensors must have been checked (:meth:`~nnunet_cpr.fused.backend.GroupStep.read_layout`).
        """
        if len(columns) == len(self._columns) and all(map(operator.is_, columns, self._columns)):
            return
        self._columns = columns
        none = [0] * len(self._key[0])
        pointers = [column or none for column in columns]
        pointers += [none] * (COLUMNS - len(columns))
        rows = [address for row in zip(*pointers) for address in row]
        if rows != self.rows:
            self.rows = rows
            self.addresses = self._upload(rows)

    def _upload(self, rows: list[int]) -> Tensor:
        return to_device(rows, torch.int64, self.device).view(-1, COLUMNS)


def step_columns(columns: Sequence[Memory], adam: bool) -> list[list[int]]:
    """Return the addresses of a group's columns in the order of the table."""
    addresses = [column.addresses for column in columns]
    return addresses if adam else addresses[:-1]  # SGD has no step counts


def chunk_count(numel: int, chunk: int) -> int:
    """Return the number of chunks of a tensor; the last one may be shorter."""
    return -(-numel // chunk)
