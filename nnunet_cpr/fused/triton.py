"""One pass on a GPU: one Triton kernel over all tensors of a parameter group.

A program of the grid takes one chunk of one tensor, which it finds through a table of addresses. It
reads each element of the parameter, its gradient and its moments once, corrects and steps it in float32,
writes it, and adds up the squares of what it wrote. The sums of the chunks are added up in a fixed order
in float64, without atomics: the same run gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from nnunet_cpr.fused._memory import Memory
from nnunet_cpr.fused._tables import Tables, chunk_count, step_columns
from nnunet_cpr.fused._trial import works
from nnunet_cpr.fused._triton_kernels import measure_kernel, step_kernel, sum_kernel
from nnunet_cpr.fused.backend import GroupStep, OnePass, Rule

CHUNK = 16384
"""Elements of one tensor that one program takes."""
BLOCK = 1024
"""Elements that it takes at once."""
_ALIGNMENT = 16  # bytes that one load can read

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@lru_cache
def is_available() -> bool:
    """Whether Triton can build and run a kernel here; if not, a warning says why.

    Triton 3.2, torch 2.6's, is left out: its interpreter gives other numbers than later ones.
    """
    if Version(triton.__version__) < Version("3.3"):
        return False

    def trial() -> bool:
        device = torch.device("cuda", torch.cuda.current_device())
        sums = torch.zeros(1, dtype=torch.float64, device=device)
        ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
        sum_kernel[(1,)](torch.ones(1, device=device), ends, sums, BLOCK=BLOCK)
        return sums.item() == 1.0

    return works("Triton", "GPU", trial)


class _Launch(Tables):
    """The tables of one launch, with memory to upload them from while a CUDA graph is captured."""

    def __init__(
        self, shapes: Sequence[torch.Size], matrices: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(shapes, matrices, device, CHUNK)
        owners = [i for i, shape in enumerate(shapes) for _ in range(chunk_count(shape.numel(), CHUNK))]
        self.chunk_tensors = to_device(owners, torch.int32, device)
        self._spare: Tensor | None = None  # pinned memory, which cannot be taken while a graph is made
        self._in_graphs: list[Any] = []

    @property
    def aligned(self) -> bool:
        return all(address % _ALIGNMENT == 0 for address in self.rows)

    def _upload(self, rows: list[int]) -> Tensor:
        if not _is_captured(self.device):
            if self._spare is None and self.device.type == "cuda":
                self._spare = torch.empty(len(rows), dtype=torch.int64).pin_memory()
            return super()._upload(rows)
        if self._spare is None:
            raise RuntimeError(
                "a CUDA graph is being captured and CPR's optimizer has not stepped before; take a few "
                "steps first, as torch's documentation advises"
            )
        # The graph copies from this memory at every replay.
        host, self._spare = self._spare.copy_(torch.tensor(rows)), None
        self._in_graphs.append(host)
        return host.to(self.device, non_blocking=True)


class TritonPass(OnePass):
    """See the module."""

    dtypes = DTYPES

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(matrices, device)
        first_partials = [0, *accumulate(chunk_count(numel, CHUNK) for numel in self.sizes)]
        self._partials = torch.zeros(first_partials[-1], device=self.device)
        self._first_partials = to_device(first_partials, torch.int32, self.device)
        self._launches: dict[Any, _Launch] = {}
        self._kept_for_graphs: list[Any] = []

    def takes_state(self, params: Memory, state: Sequence[Memory]) -> bool:
        # The moments of one parameter have one dtype, which need not be the parameter's.
        return all(
            set(column.dtypes) <= set(self.dtypes) and column.dtypes == state[0].dtypes
            for column in state
        )

    # The measure

    def _is_known(self) -> bool:
        # A graph that is replayed cannot look whether the parameters are as it left them.
        return not _is_captured(self.device) and super()._is_known()

    def _measure(self) -> None:
        for dtype in dict.fromkeys(p.dtype for p in self.matrices):
            these = [j for j, p in enumerate(self.matrices) if p.dtype == dtype]
            shapes = [self.matrices[j].shape for j in these]
            addresses = [[self.matrices[j].data_ptr() for j in these]]
            launch = self._launch(("measure", dtype), shapes, these, addresses)
            with _current(self.device):
                measure_kernel[(launch.chunks,)](
                    launch.addresses, launch.numels, launch.matrices, launch.first_chunks,
                    launch.chunk_tensors, self._first_partials, self._partials,
                    PARAM=DTYPES[dtype], ALIGNED=launch.aligned, CHUNK=CHUNK, BLOCK=BLOCK,
                )  # fmt: skip

    def _sums_of_squares(self) -> Tensor:
        sums = torch.empty(len(self.matrices), dtype=torch.float64, device=self.device)
        if self.matrices:
            with _current(self.device):
                sum_kernel[(len(sums),)](self._partials, self._first_partials, sums, BLOCK=BLOCK)
        return sums

    # The step

    def _step(
        self,
        groups: Sequence[GroupStep],
        multiplier: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        coefficients = 2 * multiplier
        scaler = (self._here(grad_scale), self._here(found_inf))
        for place, group in enumerate(groups):
            params, _, *rest = group.columns
            dtypes = [params.dtypes, *(c.dtypes for c in rest[:-1] if c.addresses)]
            kinds = list(zip(*dtypes))
            for kind in dict.fromkeys(kinds):
                these = [i for i, k in enumerate(kinds) if k == kind]
                columns = [c.part(these) if c.addresses else c for c in group.columns]
                matrices = [group.matrices[i] for i in these]
                self._step_kind((place, kind), group.rule, columns, matrices, coefficients, *scaler)

    def _step_kind(
        self,
        key: Any,
        rule: Rule,
        columns: Sequence[Memory],
        matrices: list[int],
        coefficients: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """One launch for the tensors of a group that have the same dtypes."""
        params, _, *state, _ = columns
        moment = state[0].dtypes if state else []
        launch = self._launch(key, params.shapes, matrices, step_columns(columns, rule.adam))
        if launch.chunks == 0:  # all of them empty
            return
        lr = self._here(rule.lr)
        if _is_captured(self.device):
            self._kept_for_graphs += [lr, grad_scale, found_inf, coefficients]
        with _current(self.device):
            step_kernel[(launch.chunks,)](
                launch.addresses, launch.numels, launch.matrices, launch.first_chunks,
                launch.chunk_tensors, coefficients, self._first_partials, self._partials,
                lr if isinstance(lr, Tensor) else float(lr), grad_scale, found_inf,
                float(rule.beta1), 1.0 - rule.beta1, _log(rule.beta1),
                float(rule.beta2), 1.0 - rule.beta2, _log(rule.beta2), float(rule.eps),
                PARAM=DTYPES[params.dtypes[0]],
                MOMENT=DTYPES[moment[0]] if moment else tl.float32,
                ALIGNED=launch.aligned,
                LR_IS_TENSOR=isinstance(lr, Tensor),
                ADAM=rule.adam,
                MOMENTUM=bool(moment),
                NESTEROV=rule.nesterov,
                MAXIMIZE=rule.maximize,
                AMSGRAD=rule.adam and bool(state[2].addresses),
                SCALED=grad_scale is not None,
                MAY_SKIP=found_inf is not None,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
            )  # fmt: skip

    def _here(self, value: Any) -> Any:
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
        launch.locate(columns)
        if _is_captured(self.device):  # its memory is in the graph, so it must not be given back
            self._kept_for_graphs.append((launch, launch.addresses))
        return launch


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
