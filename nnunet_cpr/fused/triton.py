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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

from nnunet_cpr._device import to_device
from nnunet_cpr.fused._memory import Memory
from nnunet_cpr.fused._self_check import compiler_works
from nnunet_cpr.fused._tables import LARGEST, PARAM, Tables, chunk_count, step_columns
from nnunet_cpr.fused._triton_kernels import changed_kernel, partials_kernel, step_kernel, sum_kernel
from nnunet_cpr.fused.backend import FusedBackend, GroupStep, Layout, Rule, sample_stride

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


class _Launch(Tables):
    """Tables of one launch, with pinned memory for uploads while a CUDA graph is captured."""

    def __init__(
        self, shapes: Sequence[torch.Size], matrices: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(shapes, matrices, device, CHUNK)
        owners = [i for i, shape in enumerate(shapes) for _ in range(chunk_count(shape.numel(), CHUNK))]
        self.chunk_tensors = to_device(owners, torch.int32, device)
        self.aligned = True
        self._pinned: Tensor | None = None  # pinned memory cannot be allocated during a capture
        self._in_graphs: list[Any] = []

    def _upload(self, rows: list[int]) -> Tensor:
        self.aligned = all(address % _ALIGNMENT == 0 for address in rows)
        if not _is_capturing(self.device):
            if self._pinned is None and self.device.type == "cuda":
                self._pinned = torch.empty(len(rows), dtype=torch.int64).pin_memory()
            return super()._upload(rows)
        if self._pinned is None:
            raise RuntimeError(
                "CUDA graph capture: expected an optimizer that has taken steps, got a new one; take a "
                "few steps before the capture, as torch's documentation recommends"
            )
        # The graph copies from this memory in every replay.
        host, self._pinned = self._pinned.copy_(torch.tensor(rows)), None
        self._in_graphs.append(host)
        return host.to(self.device, non_blocking=True)


class _StepLaunch(NamedTuple):
    """Launch of a step on tensors with the same dtypes.

    Attributes:
        param: dtype of the parameters.
        moment: dtype of the momentum or moments, None without any.
    """

    tables: _Launch
    param: torch.dtype
    moment: torch.dtype | None
    is_amsgrad: bool


class TritonBackend(FusedBackend):
    """Fused step on a GPU, in float32, bfloat16 or float16."""

    dtypes = DTYPES

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(matrices, device)
        first_partials = [0, *accumulate(chunk_count(numel, CHUNK) for numel in self.sizes)]
        self._partials = torch.zeros(first_partials[-1], device=self.device)
        self._samples = torch.zeros_like(self._partials, dtype=torch.int64)
        strides = [sample_stride(numel) for numel in self.sizes]
        self._strides = to_device(strides, torch.int32, self.device)
        self._changed = torch.zeros_like(self._strides)
        self._first_partials = to_device(first_partials, torch.int32, self.device)
        self._launches: dict[Any, _Launch] = {}
        self._step_launches: dict[int, tuple[Layout, list[_StepLaunch]]] = {}  # of each group
        self._used_by_graphs: list[Any] = []

    def supports_state(self, params: Memory, state: Sequence[Memory]) -> bool:
        # The moments of a parameter share a dtype, which may differ from the parameter's.
        return all(
            set(column.dtypes) <= set(self.dtypes) and column.dtypes == state[0].dtypes
            for column in state
        )

    # Sums of squares

    def has_current_sums(self, groups: Sequence[GroupStep]) -> bool:
        # A replayed graph cannot check whether the parameters have changed.
        return not _is_capturing(self.device) and super().has_current_sums(groups)

    def _compute_partials(self) -> None:
        self._changed.fill_(1)
        self._compute_changed_partials()

    def _refresh_partials(self) -> bool:
        self._changed.zero_()
        for dtype, launch in self._sum_launches():
            with _device_context(self.device):
                changed_kernel[(launch.chunks,)](
                    launch.addresses, launch.numels, launch.matrices, launch.first_chunks,
                    launch.chunk_tensors, self._first_partials, self._strides, self._samples,
                    self._changed,
                    PARAM=DTYPES[dtype], ALIGNED=launch.aligned, CHUNK=CHUNK, SAMPLES=SAMPLES,
                )  # fmt: skip
        self._compute_changed_partials()
        return False

    def _sum_launches(self) -> Iterator[tuple[torch.dtype, _Launch]]:
        """Yield the launches on all matrices, one for each dtype."""
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            indices = [j for j, p in enumerate(self.matrices) if p.dtype == dtype]
            shapes = [self.matrices[j].shape for j in indices]
            addresses = [[self.matrices[j].data_ptr() for j in indices]]
            launch = self._launch(("partials", dtype), shapes, indices, addresses)
            if launch.chunks:
                yield dtype, launch

    def _compute_changed_partials(self) -> None:
        for dtype, launch in self._sum_launches():
            with _device_context(self.device):
                partials_kernel[(launch.chunks,)](
                    launch.addresses, launch.numels, launch.matrices, launch.first_chunks,
                    launch.chunk_tensors, self._first_partials, self._partials,
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
        groups: Sequence[GroupStep],
        decay: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        scaler = (self._to_device(grad_scale), self._to_device(found_inf))
        for index, group in enumerate(groups):
            for launch in self._launches_of(index, group):
                self._launch_step(launch, group.rule, decay, *scaler)

    def _launches_of(self, index: int, group: GroupStep) -> list[_StepLaunch]:
        """Return the launches of a group, one for each combination of dtypes."""
        layout, launches = self._step_launches.get(index, (None, []))
        if layout is group.layout:
            return launches
        params, _, *rest = group.columns
        kinds = list(zip(*(c.dtypes for c in (params, *rest[:-1]) if c.addresses)))
        distinct = list(dict.fromkeys(kinds))
        launches = []
        for kind in distinct:
            columns, matrices = group.columns, group.matrices
            if len(distinct) > 1:
                members = [i for i, k in enumerate(kinds) if k == kind]
                columns = [c.part(members) if c.addresses else c for c in columns]
                matrices = [matrices[i] for i in members]
            addresses = step_columns(columns, group.rule.adam)
            tables = self._launch((index, kind), columns[PARAM].shapes, matrices, addresses)
            is_amsgrad = group.rule.adam and bool(columns[LARGEST].addresses)
            moment = kind[1] if len(kind) > 1 else None
            launches.append(_StepLaunch(tables, kind[0], moment, is_amsgrad))
        self._step_launches[index] = group.layout, launches
        return launches

    def _launch_step(
        self,
        step: _StepLaunch,
        rule: Rule,
        coefficients: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Launch the kernel on tensors of a group with the same dtypes."""
        launch = step.tables
        if launch.chunks == 0:  # all tensors are empty
            return
        lr = self._to_device(rule.lr)
        if _is_capturing(self.device):
            # The graph uses this memory, which must not be freed.
            self._used_by_graphs += [lr, grad_scale, found_inf, coefficients, launch, launch.addresses]
        with _device_context(self.device):
            step_kernel[(launch.chunks,)](
                launch.addresses, launch.numels, launch.matrices, launch.first_chunks,
                launch.chunk_tensors, coefficients, self._first_partials, self._partials,
                self._strides, self._samples,
                lr if isinstance(lr, Tensor) else float(lr), grad_scale, found_inf,
                float(rule.beta1), 1.0 - rule.beta1, _log(rule.beta1),
                float(rule.beta2), 1.0 - rule.beta2, _log(rule.beta2), float(rule.eps),
                PARAM=DTYPES[step.param],
                MOMENT=tl.float32 if step.moment is None else DTYPES[step.moment],
                ALIGNED=launch.aligned,
                LR_IS_TENSOR=isinstance(lr, Tensor),
                ADAM=rule.adam,
                MOMENTUM=step.moment is not None,
                NESTEROV=rule.nesterov,
                MAXIMIZE=rule.maximize,
                AMSGRAD=step.is_amsgrad,
                SCALED=grad_scale is not None,
                MAY_SKIP=found_inf is not None,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                SAMPLES=SAMPLES,
            )  # fmt: skip

    def _to_device(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

    def _launch(
        self,
        key: Any,
        shapes: Sequence[torch.Size],
        matrices: Sequence[int],
        columns: Sequence[Sequence[int]],
    ) -> _Launch:
        launch = self._launches.get(key)
        if launch is None or not launch.fits(shapes, matrices):
            launch = self._launches[key] = _Launch(shapes, matrices, self.device)
        launch.set_addresses(columns)
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
