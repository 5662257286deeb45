"""One pass on the CPU: torch's fused step on pieces that stay in the processor's cache.

A step moves tens of bytes a parameter and computes little, so what counts is how often the memory is
read. Each piece is corrected, stepped and measured before the next is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from nnunet_cpr.kernels.one_pass import OnePass, StepTensors
from nnunet_cpr.row_norms import Part, RowNorms, flat_in_memory, row_length

if TYPE_CHECKING:
    from nnunet_cpr.optim import CPROptimizer

_PIECE = 1 << 20
"""Elements in a piece: few enough for the cache, enough to make up for the calls."""

_SMALLEST_DECAY = 3e-6
"""The least 2 lambda that a fused step takes: as a factor, 1 - 2 lambda, it would be off by over 1 %."""


@dataclass
class _Piece:
    """Part of one matrix, or several whole ones, that are stepped together."""

    params: list[Tensor] = field(default_factory=list)
    moments: list[list[Tensor]] = field(default_factory=list)
    matrices: list[int] = field(default_factory=list)  # j of each; empty for what is not regularized
    sources: list[int] = field(default_factory=list)  # place of each in the group
    extent: tuple[int, int] | None = None  # of a part, in elements
    parts: list[Part] = field(default_factory=list)  # rows to measure


class CPUPass(OnePass):
    """See the module."""

    device_type = "cpu"

    def __init__(self, optimizer: CPROptimizer) -> None:
        super().__init__(optimizer)
        self._norms = RowNorms(self.matrices)
        self._plans: list[tuple[list[int], list[_Piece]]] = [([], []) for _ in optimizer.param_groups]

    def _measure(self) -> None:
        self._norms.take(
            part
            for j, p in enumerate(self.matrices)
            for part in self._norms.parts(j, flat_in_memory(p.detach()))
        )

    def _sums(self) -> Tensor:
        return self._norms.sums_of_squares()

    def _step(self, multiplier: Tensor) -> None:
        coefficients = (2 * multiplier).tolist()
        for place, group in enumerate(self.optimizer.param_groups):
            tensors = self.optimizer.step_tensors(group)
            for piece in self._plan(place, tensors):
                self._take(piece, tensors, group, coefficients)
            self.optimizer.after_step(tensors)

    def _take(self, piece: _Piece, tensors: StepTensors, group: dict, coefficients: list[float]) -> None:
        grads = [tensors.grads[i] for i in piece.sources]
        if piece.extent is not None:
            grads = [flat_in_memory(g)[slice(*piece.extent)] for g in grads]
        decay = 0.0
        for p, j in zip(piece.params, piece.matrices):
            c = coefficients[j]
            if c and piece.extent and self.optimizer.can_decay(group) and c >= _SMALLEST_DECAY:
                decay = c
            elif c:
                p.add_(p, alpha=-c)
        steps = [tensors.steps[i] for i in piece.sources] if tensors.steps else []
        self.optimizer.fused_step(group, StepTensors(piece.params, grads, piece.moments, steps), decay)
        self._norms.take(piece.parts)

    def _plan(self, place: int, tensors: StepTensors) -> list[_Piece]:
        """The pieces of a group, made anew when a tensor has moved or other ones have gradients."""
        everything = [tensors.params, *tensors.moments]
        key = [t.data_ptr() for some in everything for t in some]
        key += [id(p) for p in tensors.params]
        if self._plans[place][0] != key:
            self._plans[place] = key, list(self._pieces(tensors))
        return self._plans[place][1]

    def _pieces(self, tensors: StepTensors) -> Iterator[_Piece]:
        """Torch's fused steps take tensors of one dtype at a time."""
        for dtype in dict.fromkeys(p.dtype for p in tensors.params):
            these = [i for i, p in enumerate(tensors.params) if p.dtype == dtype]
            matrices = [i for i in these if id(tensors.params[i]) in self.matrix_of]
            others = [i for i in these if id(tensors.params[i]) not in self.matrix_of]
            if others:
                yield self._several(tensors, others)
            together: list[int] = []
            filled = 0
            for i in matrices:
                numel = tensors.params[i].numel()
                if numel > _PIECE // 2:
                    yield from self._cut(tensors, i)
                    continue
                if filled + numel > _PIECE:
                    yield self._several(tensors, together)
                    together, filled = [], 0
                together.append(i)
                filled += numel
            if together:
                yield self._several(tensors, together)

    def _several(self, tensors: StepTensors, sources: list[int]) -> _Piece:
        params = [tensors.params[i] for i in sources]
        matrices = [self.matrix_of[id(p)] for p in params if id(p) in self.matrix_of]
        return _Piece(
            params=params,
            moments=[[some[i] for i in sources] for some in tensors.moments],
            matrices=matrices,
            sources=sources,
            parts=[
                part
                for p, j in zip(params, matrices)
                for part in self._norms.parts(j, flat_in_memory(p.detach()))
            ],
        )

    def _cut(self, tensors: StepTensors, i: int) -> Iterator[_Piece]:
        p = tensors.params[i]
        j = self.matrix_of[id(p)]
        flat = flat_in_memory(p.detach())
        moments = [flat_in_memory(some[i]) for some in tensors.moments]
        row = row_length(p.numel())
        size = _PIECE // row * row
        for start in range(0, p.numel(), size):
            end = min(start + size, p.numel())
            yield _Piece(
                params=[flat[start:end]],
                moments=[[m[start:end]] for m in moments],
                matrices=[j],
                sources=[i],
                extent=(start, end),
                parts=self._norms.parts(j, flat[start:end], start),
            )
