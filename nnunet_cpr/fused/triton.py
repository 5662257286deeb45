"""Fused step on a GPU: one Triton kernel for all tensors of a parameter group.

A program handles one chunk of one tensor, found by a table of addresses. It reads each element of the
parameter, its gradient and its moments once, decays and updates it in float32, writes it, and adds up
the squares of the written values. The sums of the chunks are added up in float64 in a fixed order,
without atomics, so results are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

from nnunet_cpr._device import to_device
from nnunet_cpr.fused._self_check import compiler_works
from nnunet_cpr.fused._triton_kernels import changed_kernel, partials_kernel, step_kernel, sum_kernel
from nnunet_cpr.fused.backend import COLUMNS, FusedBackend, GroupStep, sample_stride

CHUNK = 16384
"""Number of elements of a chunk, which one program handles."""
BLOCK = 1024
"""Number of elements that a program handles at once."""
SAMPLES = 1024
"""Number of elements of a chunk that are compared at most, a power of two."""
_ALIGNMENT = 16  # bytes of the widest load

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@lru_cache
def is_available() -> bool:
    """Return True if Triton compiles and runs a kernel; if not, warn with the reason.

    Triton 3.2 (torch 2.6) is not supported: its interpreter gives other results than later versions.
    """
    if Version(triton.__version__) < Version("3.3"):
        return False

    def trial() -> bool:
        device = torch.device("cuda", torch.cuda.current_device())
        sums = torch.zeros(1, dtype=torch.float64, device=device)
        ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
        sum_kernel[(1,)](torch.ones(1, device=device), ends, sums, BLOCK=BLOCK)
        return sums.item() == 1.0

    return compiler_works("Triton", "GPU", trial)


class _Launch:
    """Tables of the n tensors of one launch on the GPU.

    Attributes:
        numels, matrices, first_chunks: as in :class:`~nnunet_cpr.fused._cpu_kernels.TableArrays`.
        chunk_tensors: index of the tensor of each chunk, int32.
        addresses: int64 ``[n, COLUMNS]``, 0 for missing state.
        aligned: True if kernels may use the widest loads.
    """

    def __init__(self, numels: Sequence[int], matrices: Sequence[int], device: torch.device) -> None:
        counts = [-(-numel // CHUNK) for numel in numels]
        self.device = device
        self.chunks = sum(counts)
        self.numels = to_device(numels, torch.int64, device)
        self.matrices = to_device(matrices, torch.int32, device)
        self.first_chunks = to_device([0, *accumulate(counts)], torch.int32, device)
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        self.chunk_tensors = to_device(owners, torch.int32, device)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        self.aligned = True
        self._rows: list[int] = []
        self._pinned: Tensor | None = None  # pinned memory cannot be allocated during a capture
        self._in_graphs: list[Any] = []

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """First arguments of the kernels."""
        return self.addresses, self.numels, self.matrices, self.first_chunks, self.chunk_tensors

    def set_addresses(self, rows: list[int]) -> None:
        """Upload the addresses if they have changed."""
        if rows == self._rows:
            return
        self._rows = rows
        self.aligned = all(address % _ALIGNMENT == 0 for address in rows)
        self.addresses = self._upload(rows).view(-1, COLUMNS)

    def _upload(self, rows: list[int]) -> Tensor:
        if not _is_capturing(self.device):
            if self._pinned is None and self.device.type == "cuda":
                self._pinned = torch.empty(len(rows), dtype=torch.int64).pin_memory()
            return to_device(rows, torch.int64, self.device)
        if self._pinned is None:
            raise RuntimeError(
                "CUDA graph capture: expected an optimizer that has taken steps, got a new one; take a "
                "few steps before the capture, as torch's documentation recommends"
            )
        # The graph copies from this memory in every replay.
        host, self._pinned = self._pinned.copy_(torch.tensor(rows)), None
        self._in_graphs.append(host)
        return host.to(self.device, non_blocking=True)


class TritonBackend(FusedBackend):
    """Fused step on a GPU, in float32, bfloat16 or float16."""

    dtypes = DTYPES
    needs_self_check = True

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(matrices, device)
        first_partials = [0, *accumulate(-(-numel // CHUNK) for numel in self.sizes)]
        self._partials = torch.zeros(first_partials[-1], device=self.device)
        self._samples = torch.zeros_like(self._partials, dtype=torch.int64)
        # A larger stride samples the first element of a chunk too, but offsets are 32-bit integers.
        strides = [min(sample_stride(numel), CHUNK + 1) for numel in self.sizes]
        self._strides = to_device(strides, torch.int32, self.device)
        self._changed = torch.zeros_like(self._strides)
        self._first_partials = to_device(first_partials, torch.int32, self.device)
        self._launches: dict[Any, _Launch] = {}
        self._used_by_graphs: list[Any] = []

    def _supports_dtypes(self, group: GroupStep) -> bool:
        # The moments of a parameter share a dtype, which may differ from the parameter's.
        kinds = set(group.dtypes())
        return all(set(kind) <= set(self.dtypes) and len(set(kind[1:])) <= 1 for kind in kinds)

    # Sums of squares

    def sums_of_squares(self) -> Tensor:
        if _is_capturing(self.device):  # a replayed graph cannot check for changes
            self.discard_sums()
        return super().sums_of_squares()

    def _compute_partials(self) -> None:
        self._changed.fill_(1)
        self._compute_changed_partials()

    def _refresh_partials(self) -> bool:
        self._changed.zero_()
        for dtype, launch in self._sum_launches():
            with _device_context(self.device):
                changed_kernel[(launch.chunks,)](
                    *launch.tables, self._first_partials, self._strides, self._samples, self._changed,
                    PARAM=DTYPES[dtype], ALIGNED=launch.aligned, CHUNK=CHUNK, SAMPLES=SAMPLES,
                )  # fmt: skip
        self._compute_changed_partials()
        return False

    def _sum_launches(self) -> Iterator[tuple[torch.dtype, _Launch]]:
        """Yield the launches on all matrices, one for each dtype."""
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            indices = [j for j, p in enumerate(self.matrices) if p.dtype == dtype]
            params = [self.matrices[j] for j in indices]
            addresses = [column for p in params for column in (p.data_ptr(), *[0] * (COLUMNS - 1))]
            launch = self._launch(("partials", dtype), params, indices, addresses)
            if launch.chunks:
                yield dtype, launch

    def _compute_changed_partials(self) -> None:
        for dtype, launch in self._sum_launches():
            with _device_context(self.device):
                partials_kernel[(launch.chunks,)](
                    *launch.tables, self._first_partials, self._partials,
                    self._strides, self._samples, self._changed,
                    PARAM=DTYPES[dtype], ALIGNED=launch.aligned, CHUNK=CHUNK, BLOCK=BLOCK,
                    SAMPLES=SAMPLES,
                )  # fmt: skip

    def _add_partials(self) -> Tensor:
        sums = torch.empty(len(self.matrices), dtype=torch.float64, device=self.device)
        if self.matrices:
            with _device_context(self.device):
                sum_kernel[(len(sums),)](self._partials, self._first_partials, sums, BLOCK=BLOCK)
        return sums

    # Step

    def _step(
        self,
        launch: GroupStep,
        decay: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        rule, moments = launch.rule, launch.state[0]
        key = (id(launch.params[0]), len(launch.params))
        tables = self._launch(key, launch.params, launch.matrices, launch.addresses())
        if tables.chunks == 0:  # all tensors are empty
            return
        lr, grad_scale, found_inf = map(self._to_device, (rule.lr, grad_scale, found_inf))
        if _is_capturing(self.device):
            # The graph uses this memory, which must not be freed.
            self._used_by_graphs += [lr, grad_scale, found_inf, decay, tables, tables.addresses]
        with _device_context(self.device):
            step_kernel[(tables.chunks,)](
                *tables.tables, decay, self._first_partials, self._partials,
                self._strides, self._samples,
                lr if isinstance(lr, Tensor) else float(lr), grad_scale, found_inf,
                float(rule.beta1), 1.0 - rule.beta1, _log(rule.beta1),
                float(rule.beta2), 1.0 - rule.beta2, _log(rule.beta2), float(rule.eps),
                PARAM=DTYPES[launch.params[0].dtype],
                MOMENT=DTYPES[moments[0].dtype] if moments else tl.float32,
                ALIGNED=tables.aligned,
                LR_IS_TENSOR=isinstance(lr, Tensor),
                ADAM=rule.adam,
                MOMENTUM=bool(moments),
                NESTEROV=rule.nesterov,
                MAXIMIZE=rule.maximize,
                AMSGRAD=rule.adam and bool(launch.state[2]),
                SCALED=grad_scale is not None,
                MAY_SKIP=found_inf is not None,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                SAMPLES=SAMPLES,
            )  # fmt: skip

    def _to_device(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

    def _launch(
        self, key: Any, params: Sequence[Tensor], matrices: Sequence[int], addresses: list[int]
    ) -> _Launch:
        numels = tuple(p.numel() for p in params)
        key = (key, numels, tuple(matrices))
        if key not in self._launches:
            self._launches[key] = _Launch(numels, matrices, self.device)
        launch = self._launches[key]
        launch.set_addresses(addresses)
        if _is_capturing(self.device):  # the graph uses its memory, which must not be freed
            self._used_by_graphs.append((launch, launch.addresses))
        return launch


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with ``device`` as the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
