"""Where a kernel finds the tensors of a parameter group: by address, in chunks of equal length."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nnunet_cpr._device import to_device
from nnunet_cpr.fused._memory import Memory

PARAM, GRAD, FIRST, SECOND, LARGEST, STEP = range(6)
"""The columns of the table of addresses: the parameter, its gradient, and the state in the order of
:class:`~nnunet_cpr.fused.backend.GroupStep` (FIRST is SGD's momentum or Adam's first moment)."""
COLUMNS = 6


class Tables:
    """What a kernel is told of the tensors that one launch covers, on their device.

    Attributes:
        addresses: int64 ``[tensors, COLUMNS]``, 0 where there is no such state.
        numels: int64, elements of each tensor.
        matrices: int32, the number j of each tensor, -1 for what is not regularized.
        first_chunks: int32, the number of each tensor's first chunk, and at the end that of chunks.
        chunks: how many there are.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], matrices: Sequence[int], device: torch.device, chunk: int
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        chunks = [chunk_count(numel, chunk) for numel in numels]
        self.covers = (list(shapes), list(matrices))
        self.device = device
        self.chunks = sum(chunks)
        self.numels = to_device(numels, torch.int64, device)
        self.matrices = to_device(matrices, torch.int32, device)
        self.first_chunks = to_device([0, *accumulate(chunks)], torch.int32, device)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        self.rows: list[int] = []
        self._located: Sequence[Sequence[int]] = ()

    def fits(self, shapes: Sequence[torch.Size], matrices: Sequence[int]) -> bool:
        """Return True if the tables were made for tensors of these shapes and numbers."""
        return self.covers == (shapes, matrices)

    def locate(self, columns: Sequence[Sequence[int]]) -> None:
        """Take over the addresses of the tensors, column by column; an empty column is no state.

        The tensors must have been checked (:meth:`~nnunet_cpr.fused.backend.GroupStep.look`).
        """
        if len(columns) == len(self._located) and all(map(operator.is_, columns, self._located)):
            return
        self._located = columns
        none = [0] * len(self.covers[0])
        pointers = [column or none for column in columns]
        pointers += [none] * (COLUMNS - len(columns))
        rows = [address for row in zip(*pointers) for address in row]
        if rows != self.rows:
            self.rows = rows
            self.addresses = self._upload(rows)

    def _upload(self, rows: list[int]) -> Tensor:
        return to_device(rows, torch.int64, self.device).view(-1, COLUMNS)


def step_columns(columns: Sequence[Memory], adam: bool) -> list[list[int]]:
    """Return the addresses of a group's columns in the order of the table's."""
    found = [column.addresses for column in columns]
    if adam:
        return found
    return found[:-1]  # SGD counts no steps


def chunk_count(numel: int, chunk: int) -> int:
    """Chunks of a tensor; its last may be shorter."""
    return -(-numel // chunk)
