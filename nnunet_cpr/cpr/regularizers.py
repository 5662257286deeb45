"""Regularization functions R(theta) of a parameter matrix, and their gradients.

Every R is a mean *per element*, so that one range of bounds and the update rate mu = 1 suit parameter
matrices of all sizes (the paper's Kappa-K values, 0.005 to 0.16, are means of squares). Every R is a
function of sums over the elements and of their number.

To add one: write a subclass of :class:`Regularizer` and list it in :data:`REGULARIZERS`. Its name is
then available in every optimizer; listed in ``REGULARIZER_WORDS`` of ``nnunet_cpr/names/suffixes.py``,
it is also a suffix of the nnU-Net trainers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nnunet_cpr.cpr.sums import sums_of_squares
from nnunet_cpr.refusals import short_repr


class Regularizer(ABC):
    """Regularization function R(theta) of J parameter matrices, with its gradient direction g(theta).

    Attributes:
        name: name in settings, checkpoints and trainer names. Two functions need two names, also
            where they differ in a parameter only.
        largest_multiplier: upper limit of the multiplier in a correction.

    Example:
        >>> regularizer, theta = L2(), [torch.tensor([[1.0, 3.0]])]
        >>> sums, numel = regularizer.sums(theta), torch.tensor([2])
        >>> regularizer.measure(sums, numel)
        tensor([5.])
        >>> regularizer.correct_(theta, torch.tensor([0.25]), sums, numel)
        >>> theta
        [tensor([[0.5000, 1.5000]])]
    """

    name: ClassVar[str]
    largest_multiplier: ClassVar[float] = math.inf

    @abstractmethod
    def sums(self, params: list[Tensor]) -> Tensor:
        """Return the sums over the elements of each parameter that R needs, ``[rows, J]``."""

    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        """Return R of each parameter, float32 ``[J]``: by default the sum per element.

        Args:
            sums: result of :meth:`sums`, ``[rows, J]``.
            numel: number of elements of each parameter, ``[J]``.
        """
        return (sums[0] / numel).float()

    @abstractmethod
    def correct_(self, params: list[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor) -> None:
        """Subtract ``multiplier * g(theta)`` from each parameter in place.

        Args:
            params: the J parameters.
            multiplier: Lagrange multipliers, ``[J]``.
            sums, numel: as in :meth:`measure`.
        """


class L2(Regularizer):
    """R = mean(theta^2), g = 2 theta, so the correction multiplies theta by 1 - 2 lambda."""

    name = "l2"
    largest_multiplier = 0.5  # above it, 1 - 2 lambda would flip the sign of theta

    def sums(self, params: list[Tensor]) -> Tensor:
        return sums_of_squares(params)[None]

    def correct_(self, params: list[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor) -> None:
        subtract_share_(params, 2 * multiplier)


class L1(Regularizer):
    """R = mean(|theta|), g = sign(theta)."""

    name = "l1"

    def sums(self, params: list[Tensor]) -> Tensor:
        return _stack([p.abs().sum(dtype=accumulator(p.device)) for p in params])[None]

    def correct_(self, params: list[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor) -> None:
        _subtract_(params, multiplier, lambda p, _: p.sign())


class Std(Regularizer):
    """R = std(theta), unbiased, g = (theta - mean) / ((n - 1) std).

    R and the correction of a matrix with one element are 0.
    """

    name = "std"

    def sums(self, params: list[Tensor]) -> Tensor:
        total = _stack([p.sum(dtype=accumulator(p.device)) for p in params])
        norms = _stack([torch.linalg.vector_norm(p, dtype=accumulator(p.device)) for p in params])
        return torch.stack([total, norms.square()])

    def _deviation(self, sums: Tensor, numel: Tensor) -> Tensor:
        total, squares = sums
        # Rounding may make the sum of squared deviations negative.
        deviations = (squares - total.square() / numel).clamp(min=0)
        return (deviations / (numel - 1).clamp(min=1)).sqrt()

    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        return self._deviation(sums, numel).float()

    def correct_(self, params: list[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor) -> None:
        scale = (numel - 1) * self._deviation(sums, numel)
        coefficient = torch.where(scale > 0, multiplier / scale, 0.0).float()
        # The mean of a matrix that is not corrected may not be finite.
        means = torch.where(coefficient > 0, sums[0] / numel, 0.0).unbind()
        _subtract_(params, coefficient, lambda p, j: p - means[j].to(p))


class Huber(Regularizer):
    """R = mean(h(theta)), h = theta^2 / 2 where |theta| < 1 and |theta| - 1/2 elsewhere."""

    name = "huber"

    def sums(self, params: list[Tensor]) -> Tensor:
        absolute = [p.abs().to(torch.promote_types(p.dtype, torch.float32)) for p in params]
        losses = [torch.where(a < 1, a.square() / 2, a - 0.5) for a in absolute]
        return _stack([h.sum(dtype=accumulator(h.device)) for h in losses])[None]

    def correct_(self, params: list[Tensor], multiplier: Tensor, sums: Tensor, numel: Tensor) -> None:
        _subtract_(params, multiplier, lambda p, _: p.clamp(-1, 1))


REGULARIZERS: dict[str, Regularizer] = {r.name: r for r in (L2(), L1(), Std(), Huber())}


def get_regularizer(regularizer: str | Regularizer) -> Regularizer:
    """Return the regularization function with a name; return an object unchanged.

    Raises:
        TypeError: neither a name nor a regularization function.
        ValueError: unknown name.

    Example:
        >>> get_regularizer("huber").name, get_regularizer(L2()).name
        ('huber', 'l2')
    """
    known = ", ".join(REGULARIZERS)
    if isinstance(regularizer, Regularizer):
        return regularizer
    if not isinstance(regularizer, str):
        raise TypeError(
            f"regularizer: expected one of {known}, or an instance of Regularizer, got "
            f"{short_repr(regularizer)}"
        )
    if regularizer not in REGULARIZERS:
        raise ValueError(f"unknown regularizer {short_repr(regularizer)}; choose from {known}")
    return REGULARIZERS[regularizer]


def accumulator(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over elements and element counts: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _stack(values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    return torch.stack([v.to(first.device, accumulator(first.device)) for v in values])


def subtract_share_(params: Sequence[Tensor], shares: Tensor) -> None:
    """Subtract a share of each tensor from it in place, without waiting for a GPU.

    A factor is exactly 1 for a share of 0, so that a tensor that is left out is not changed even where
    it is infinite: infinity minus 0 times infinity would not be a number.

    Args:
        params: J tensors, on any devices.
        shares: share of each of them, ``[J]``.

    Example:
        >>> tensors = [torch.tensor([2.0, 4.0]), torch.tensor([math.inf])]
        >>> subtract_share_(tensors, torch.tensor([0.25, 0.0]))
        >>> tensors
        [tensor([1.5000, 3.0000]), tensor([inf])]
    """
    factors = 1 - shares.to(accumulator(shares.device))
    in_float32 = factors.float()
    if all([p.dtype == torch.float32 and p.device == factors.device for p in params]):
        torch._foreach_mul_(list(params), in_float32.unbind())  # in C, where the time of the host counts
        return
    for p, exact, factor in zip(params, factors.unbind(), in_float32.unbind()):
        if p.dtype == torch.float32:
            p.mul_(_on_device_of(p, factor))
        elif p.dtype == torch.float64:
            p.mul_(_on_device_of(p, exact))
        else:  # a factor in half precision would lose the digits of a small share
            p.copy_(p.float() * _on_device_of(p, factor))


def clamp_to_finite(t: Tensor) -> Tensor:
    """Return a tensor with the largest number in place of infinity: 0 times infinity is not a number."""
    largest = torch.finfo(t.dtype).max
    return t.clamp(-largest, largest)


def _on_device_of(p: Tensor, value: Tensor) -> Tensor:
    """Return a scalar tensor on the device of a parameter, which may be another GPU."""
    return value if value.device == p.device else value.to(p.device)


def _subtract_(
    params: list[Tensor], coefficient: Tensor, direction: Callable[[Tensor, int], Tensor]
) -> None:
    """Subtract ``coefficient[j] * direction(theta_j, j)`` from each theta_j in place.

    It does not wait for a GPU. Where a coefficient is 0, the matrix is not changed, infinite or not.
    """
    for j, (p, c) in enumerate(zip(params, coefficient.unbind())):
        p.addcmul_(clamp_to_finite(direction(p, j)), c.to(p), value=-1)
