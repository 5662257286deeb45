"""Measures R of a parameter matrix's size, and the corrections that their gradients ask for.

Every measure is taken *per element*, so that one range of bounds serves matrices of every size and
the multipliers' update rate mu = 1 suits all of them (the paper's Kappa-K values, 0.005 to 0.16, are
means of squares). Every measure is a function of sums over the elements and of their number.

To add a measure: write a subclass of :class:`Regularizer` and list it in :data:`REGULARIZERS`; its
name is then a choice of every optimizer here and a suffix of the nnU-Net trainers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nnunet_cpr._row_norms import sums_of_squares


class Regularizer(ABC):
    """A measure R(theta) and its gradient direction g(theta), so that theta <- theta - lambda * g.

    Tensors over the J matrices have length J; ``sums`` has one row for each sum that R needs.
    """

    name: ClassVar[str]
    largest_multiplier: ClassVar[float] = math.inf
    """A correction uses at most this multiplier."""

    @abstractmethod
    def sums(self, params: Sequence[Tensor]) -> Tensor:
        """The sums over the elements of each parameter that R is a function of: ``[rows, J]``."""

    @abstractmethod
    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        """R of each parameter, float32 ``[J]``, from its :meth:`sums` and number of elements."""

    @abstractmethod
    def correct_(
        self, params: Sequence[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor
    ) -> None:
        """Theta <- theta - multiplier * g(theta), in place; ``multiplier`` is ``[J]``."""


class L2(Regularizer):
    """R = mean(theta^2), g = 2 theta: weight decay by the factor 1 - 2 lambda."""

    name = "l2"
    largest_multiplier = 0.5  # beyond it 1 - 2 lambda would flip the sign of theta

    def sums(self, params: Sequence[Tensor]) -> Tensor:
        if all(p.device.type == "cpu" for p in params):
            return sums_of_squares(params)[None]
        norms = torch._foreach_norm(list(params), dtype=accumulator(params[0].device))
        return _stack(norms).square()[None]

    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        return (sums[0] / numel).float()

    def correct_(
        self, params: Sequence[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor
    ) -> None:
        _subtract_(params, 2 * multiplier, lambda p, _: p)


class L1(Regularizer):
    """R = mean(|theta|), g = sign(theta)."""

    name = "l1"

    def sums(self, params: Sequence[Tensor]) -> Tensor:
        return _stack([p.abs().sum(dtype=accumulator(p.device)) for p in params])[None]

    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        return (sums[0] / numel).float()

    def correct_(
        self, params: Sequence[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor
    ) -> None:
        _subtract_(params, multiplier, lambda p, _: p.sign())


class Std(Regularizer):
    """R = std(theta), unbiased, g = (theta - mean) / ((n - 1) std).

    A matrix of one element has no spread: its measure is 0, and so is its correction.
    """

    name = "std"

    def sums(self, params: Sequence[Tensor]) -> Tensor:
        total = _stack([p.sum(dtype=accumulator(p.device)) for p in params])
        norms = _stack([torch.linalg.vector_norm(p, dtype=accumulator(p.device)) for p in params])
        return torch.stack([total, norms.square()])

    def _deviation(self, sums: Tensor, numel: Tensor) -> Tensor:
        total, squares = sums
        spread = (squares - total.square() / numel).clamp(min=0)  # rounding may leave it below 0
        return (spread / (numel - 1).clamp(min=1)).sqrt()

    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        return self._deviation(sums, numel).float()

    def correct_(
        self, params: Sequence[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor
    ) -> None:
        scale = (numel - 1) * self._deviation(sums, numel)
        coefficient = torch.where(scale > 0, multiplier / scale, 0.0).float()
        # Not for the matrices that are left out: theirs may not be finite.
        mean = _readable(torch.where(coefficient > 0, sums[0] / numel, 0.0))
        _subtract_(params, coefficient, lambda p, j: p - mean[j])


class Huber(Regularizer):
    """R = mean(h(theta)), h = theta^2 / 2 where |theta| < 1 and |theta| - 1/2 elsewhere."""

    name = "huber"

    def sums(self, params: Sequence[Tensor]) -> Tensor:
        sizes = (p.abs().to(torch.promote_types(p.dtype, torch.float32)) for p in params)
        return _stack(
            [torch.where(a < 1, a.square() / 2, a - 0.5).sum(dtype=accumulator(a.device)) for a in sizes]
        )[None]

    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        return (sums[0] / numel).float()

    def correct_(
        self, params: Sequence[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor
    ) -> None:
        _subtract_(params, multiplier, lambda p, _: p.clamp(-1, 1))


REGULARIZERS: dict[str, Regularizer] = {r.name: r for r in (L2(), L1(), Std(), Huber())}


def get_regularizer(regularizer: str | Regularizer) -> Regularizer:
    """Return the regularization function of that name; an object is returned as it is.

    Raises:
        ValueError: there is no such regularization function.

    Example:
        >>> get_regularizer("huber").name, get_regularizer(L2()).name
        ('huber', 'l2')
    """
    if isinstance(regularizer, Regularizer):
        # One object for each that has no settings, so that equal ones are handled together.
        known = REGULARIZERS.get(regularizer.name)
        return known if known is not None and type(known) is type(regularizer) else regularizer
    try:
        return REGULARIZERS[regularizer]
    except (KeyError, TypeError):
        known_names = ", ".join(REGULARIZERS)
        given = " ".join(repr(regularizer).split())[:100]
        raise ValueError(f"unknown regularizer {given}; choose from {known_names}") from None


def accumulator(device: torch.device) -> torch.dtype:
    """Return the dtype of long sums and of element counts: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _stack(values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    return torch.stack([v.to(first.device, accumulator(first.device)) for v in values])


def _readable(values: Tensor) -> Sequence[float | Tensor]:
    """One number for each matrix: read on the CPU, left on the device elsewhere.

    Reading from a GPU would make the host wait for it, which no training step should.
    """
    return values.tolist() if values.device.type == "cpu" else values.unbind()


def _subtract_(
    params: Iterable[Tensor], coefficient: Tensor, direction: Callable[[Tensor, int], Tensor]
) -> None:
    """theta_j <- theta_j - coefficient_j * direction(theta_j, j), one matrix after the other."""
    coefficients = _readable(coefficient)
    for j, p in enumerate(params):
        c = coefficients[j]
        if isinstance(c, Tensor):
            p.addcmul_(direction(p, j), c.to(p), value=-1)
        elif c != 0.0:
            p.add_(direction(p, j), alpha=-c)
