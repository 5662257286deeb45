"""Where a kernel finds the tensors of a parameter group: by address, in chunks of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nnunet_cpr.transfer import to_device

PARAM, GRAD, FIRST, SECOND, LARGEST, STEP = range(6)
"""The columns of the table of addresses: the parameter, its gradient, and the state in the order of
:class:`~nnunet_cpr.kernels.one_pass.StepTensors` (FIRST is SGD's momentum or Adam's first moment)."""
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
        self, params: Sequence[Tensor], matrices: Sequence[int], device: torch.device, chunk: int
    ) -> None:
        chunks = [chunk_count(p.numel(), chunk) for p in params]
        self.covers = [(id(p), p.numel()) for p in params]
        self.device = device
        self.chunks = sum(chunks)
        self.numels = to_device([p.numel() for p in params], torch.int64, device)
        self.matrices = to_device(matrices, torch.int32, device)
        self.first_chunks = to_device([0, *accumulate(chunks)], torch.int32, device)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        self.rows: list[int] = []

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that it was made for, in their sizes."""
        return self.covers == [(id(p), p.numel()) for p in params]

    def locate(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """Take over the addresses of these tensors, as many in each column as there are parameters.

        Raises:
            RuntimeError: a gradient or a state is not such as a kernel could find by its address.
        """
        none = [0] * len(self.covers)
        pointers = [[t.data_ptr() for t in column] or none for column in columns]
        pointers += [none] * (COLUMNS - len(columns))
        rows = [address for row in zip(*pointers) for address in row]
        if rows != self.rows:
            self._check(columns)
            self.rows = rows
            self.addresses = self._upload(rows)

    def _check(self, columns: Sequence[Sequence[Tensor]]) -> None:
        for number, column in enumerate(columns):
            for t, p in zip(column, columns[PARAM]):
                if t.device != self.device:
                    raise RuntimeError(
                        f"the optimizer's state is on {t.device} and its parameters are on "
                        f"{self.device}; load its state_dict() again after moving the model"
                    )
                if number == STEP and t.dtype != torch.float32:
                    raise RuntimeError(f"Adam's count of steps must be float32, not {t.dtype}")
                if number != STEP and t.shape != p.shape:
                    what = "a gradient" if number == GRAD else "the optimizer's state"
                    raise RuntimeError(
                        f"{what} of shape {tuple(t.shape)} is for a parameter that now has shape "
                        f"{tuple(p.shape)}; build a new optimizer after changing parameters"
                    )

    def _upload(self, rows: list[int]) -> Tensor:
        return to_device(rows, torch.int64, self.device).view(-1, COLUMNS)


def chunk_count(numel: int, chunk: int) -> int:
    """Chunks of a tensor; its last may be shorter."""
    return -(-numel // chunk)
