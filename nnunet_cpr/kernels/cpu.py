"""One pass on the CPU: torch's fused step on pieces that stay in the processor's cache.

A step moves tens of bytes a parameter and computes little, so what counts is how often the memory is
read. Each piece is corrected, stepped and measured before the next is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nnunet_cpr.kernels.one_pass import OnePass, StepTensors
from nnunet_cpr.row_norms import SumsOfSquares, flat_in_memory, row_length, rows, sums_of_squares

if TYPE_CHECKING:
    from nnunet_cpr.optim import CPROptimizer

_PIECE = 1 << 20
"""Elements in a piece: few enough for the cache, enough to make up for the calls."""

_SMALLEST_FACTOR = 3e-6
"""The least 2 lambda that is applied as the factor 1 - 2 lambda: float32 rounds it by up to 3e-8, then
1 %. Below it, and always for SGD, which gains nothing by a factor, it is subtracted instead."""


@dataclass
class _Piece:
    """Part of one matrix, or several whole tensors, stepped together."""

    params: list[Tensor]
    state: list[list[Tensor]]
    sources: list[int]
    """The places of the tensors in the group."""
    matrices: list[int] = field(default_factory=list)
    """Their numbers j; empty for what is not regularized."""
    number: int | None = None
    """Which part of its matrix it is; None for whole tensors."""
    rows: list[tuple[int, Tensor]] = field(default_factory=list)
    """What to measure, with its j."""


class CPUPass(OnePass):
    """See the module."""

    def __init__(self, optimizer: CPROptimizer) -> None:
        super().__init__(optimizer)
        self._plans: dict[int, tuple[list[int], list[_Piece]]] = {}
        self._known = torch.zeros(len(self.matrices))

    def _measure(self) -> Tensor:
        self._known = self.optimizer.cpr.measure_of(sums_of_squares(self.matrices))
        return self._known

    def _known_measure(self) -> Tensor:
        return self._known

    def _step(self, multiplier: Tensor) -> None:
        coefficients = (2 * multiplier).tolist()
        squares = SumsOfSquares(len(self.matrices))
        for place, group in enumerate(self.optimizer.param_groups):
            tensors = self.optimizer.step_tensors(group)
            step, decay_unit = self.optimizer.fused_step(group)
            cut_gradient: tuple[Tensor, ...] = ()
            for piece in self._plan(place, tensors):
                if piece.number is None:
                    grads = [tensors.grads[i] for i in piece.sources]
                else:
                    if piece.number == 0:
                        whole = tensors.grads[piece.sources[0]]
                        cut_gradient = flat_in_memory(whole).split(_part(whole.numel()))
                    grads = [cut_gradient[piece.number]]
                decay = _correct(piece, coefficients, allow_factor=decay_unit > 1e-30)
                step(piece.params, grads, *piece.state, weight_decay=decay and decay / decay_unit)
                squares.add(piece.rows)
            self.optimizer.after_step(tensors)
        measure = self.optimizer.cpr.measure_of(squares.total())
        stepped = squares.added
        self._known = measure if stepped is None else torch.where(stepped, measure, self._known)

    def _plan(self, place: int, tensors: StepTensors) -> list[_Piece]:
        """The pieces of a group, made anew when it has other tensors."""
        addresses = [t.data_ptr() for some in (tensors.params, *tensors.state) for t in some]
        known, pieces = self._plans.get(place, ([], []))
        if known != addresses:
            pieces = list(self._pieces(tensors))
            self._plans[place] = addresses, pieces
        return pieces

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
                if _part(numel) < numel:
                    yield from self._cut(tensors, i)
                elif numel > _PIECE // 2:
                    yield self._several(tensors, [i])
                else:
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
            state=[[some[i] for i in sources] if some else [] for some in tensors.state],
            sources=sources,
            matrices=matrices,
            rows=[
                (j, row)
                for p, j in zip(params, matrices)
                for row in rows(flat_in_memory(p.detach()), p.numel())
            ],
        )

    def _cut(self, tensors: StepTensors, i: int) -> Iterator[_Piece]:
        p = tensors.params[i]
        j = self.matrix_of[id(p)]
        size = _part(p.numel())
        flat = flat_in_memory(p.detach())
        for number, part in enumerate(flat.split(size)):
            start = number * size
            yield _Piece(
                params=[part],
                state=[
                    [_same_part(some[i], p, slice(start, start + size))] if some else []
                    for some in tensors.state
                ],
                sources=[i],
                matrices=[j],
                number=number,
                rows=[(j, row) for row in rows(part, p.numel())],
            )


def _correct(piece: _Piece, coefficients: list[float], allow_factor: bool) -> float:
    """Theta <- theta - 2 lambda theta, or what is left of it for the step to take off."""
    chosen = [coefficients[j] for j in piece.matrices]
    if allow_factor and all(c >= _SMALLEST_FACTOR or c == 0 for c in chosen):
        if len(chosen) == 1:
            return chosen[0]
        if any(chosen):
            torch._foreach_mul_(piece.params, [1 - c for c in chosen])
        return 0.0
    for p, c in zip(piece.params, chosen):
        if c:
            p.add_(p, alpha=-c)
    return 0.0


def _part(numel: int) -> int:
    """Elements in a part of a large matrix: whole rows, as many in each part as can be."""
    row = row_length(numel)
    parts = max(1, round(numel / _PIECE))
    return -(-numel // (parts * row)) * row


def _same_part(state: Tensor, p: Tensor, part: slice) -> Tensor:
    """Of an optimizer's state: elements like the parameter's, or a count of steps."""
    return flat_in_memory(state)[part] if state.shape == p.shape else state
