"""Comparison methods in NumPy and float64, written from the papers, independent of the package.

Each gives, for one step of the training, the points after its own correction; the optimizer's moves come
from tests/helpers/oracle.py. Parameters are dicts by name; a gradient that is missing is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

Points = dict[str, np.ndarray]
Gradients = dict[str, "np.ndarray | None"]
Rates = dict[str, float]


class OracleBaseline:
    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        """Return the corrected parameters before the optimizer update, for those with a gradient."""
        return {n: x for n, x in points.items() if gradients[n] is not None}

    def after(self, points: Points) -> Points:
        """Return the parameters after the optimizer update and a second correction."""
        return points


@dataclass
class OracleDecoupled(OracleBaseline):
    """Loshchilov and Hutter 2019, Algorithm 2: the decay is scaled by the learning rate."""

    weight_decay: float

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        return {n: x - lr[n] * self.weight_decay * x for n, x in moving.items()}


@dataclass
class OracleCosine(OracleBaseline):
    """Cosine schedule between two coefficients (Caron et al. 2021)."""

    first: float
    last: float
    steps: int
    t: int = 0

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        way = (1 - math.cos(math.pi * min(self.t, self.steps) / self.steps)) / 2
        self.t += 1
        now = (1 - way) * self.first + way * self.last
        return {n: x - lr[n] * now * x for n, x in moving.items()}


@dataclass
class OracleAdaDecay(OracleBaseline):
    """Nakamura and Hong 2019: sigmoid of absolute gradients standardized within the layer."""

    weight_decay: float
    alpha: float

    def rate(self, gradient: np.ndarray) -> np.ndarray:
        size = np.abs(gradient)
        deviation = size - size.mean()
        std = math.sqrt(float((deviation**2).mean()))
        standard = deviation / std if std else np.zeros_like(size)
        return 2 / (1 + np.exp(-self.alpha * standard))

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        return {
            n: x - lr[n] * self.weight_decay * self.rate(gradients[n]) * x for n, x in moving.items()
        }


@dataclass
class OracleAWD(OracleBaseline):
    """Ghiasi et al. 2022, Algorithm 1: one coefficient for all matrices, averaged over steps."""

    weight_decay: float
    coefficient: float = 0.0

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        of_gradients = np.concatenate([gradients[n].ravel() for n in moving])
        of_weights = np.concatenate([x.ravel() for x in moving.values()])
        present = self.weight_decay * np.linalg.norm(of_gradients) / np.linalg.norm(of_weights)
        self.coefficient = 0.1 * self.coefficient + 0.9 * float(present)
        return {n: x - lr[n] * self.coefficient * x for n, x in moving.items()}


@dataclass
class OracleRescaling(OracleBaseline):
    """Liu et al. 2023 (Omnigrok): training with a constant norm of all weights."""

    factor: float
    initial: float | None = None

    def norm(self, points: Points) -> float:
        return math.sqrt(sum(float((x**2).sum()) for x in points.values()))

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        if self.initial is None:
            self.initial = self.norm(points)
        return super().before(points, gradients, lr)

    def after(self, points: Points) -> Points:
        norm = self.norm(points)
        return {n: x * (self.factor * self.initial / norm) for n, x in points.items()}


@dataclass
class OracleCorrected(OracleBaseline):
    """Defazio 2025, AdamC: the decay of normalized layers is scaled by lr / lr_max once more."""

    weight_decay: float
    max_lr: Rates
    normalized: tuple[str, ...]

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        scaled = {
            n: self.weight_decay * (lr[n] / self.max_lr[n] if n in self.normalized else 1.0)
            for n in moving
        }
        return {n: x * (1 - lr[n] * scaled[n]) for n, x in moving.items()}


@dataclass
class OracleIndependent(OracleBaseline):
    """Loshchilov and Hutter 2019, Algorithm 2, with the decay outside of the step size."""

    weight_decay: float
    max_lr: Rates

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        return {n: x - lr[n] / self.max_lr[n] * self.weight_decay * x for n, x in moving.items()}


@dataclass
class OracleNormControl(OracleBaseline):
    """Loshchilov 2023: decay towards the point of the same direction with the target norm."""

    weight_decay: float
    factor: float
    start: int
    t: int = 0
    target: Rates = field(default_factory=dict)

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        if self.t == self.start:
            self.target = {n: self.factor * float(np.linalg.norm(x)) for n, x in points.items()}
        self.t += 1
        moving = super().before(points, gradients, lr)
        if not self.target:
            return moving
        wanted = {n: x / np.linalg.norm(x) * self.target[n] for n, x in moving.items()}
        return {n: x + lr[n] * self.weight_decay * (wanted[n] - x) for n, x in moving.items()}


@dataclass
class OracleCautious(OracleBaseline):
    """Chen et al. 2025, Algorithm 1; the update u is that of the optimizer alone."""

    weight_decay: float
    start: Points = field(default_factory=dict)
    lr: Rates = field(default_factory=dict)

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        self.start, self.lr = super().before(points, gradients, lr), lr
        return self.start

    def after(self, points: Points) -> Points:
        result = dict(points)
        for n, x in self.start.items():
            u = x - points[n]
            decayed = np.where(u * x >= 0, x, 0.0)
            result[n] = points[n] - self.lr[n] * self.weight_decay * decayed
        return result


@dataclass
class OracleHyperball(OracleBaseline):
    """Wen et al. 2026: R N(x - lr R N(u)), where N divides by the norm and R is the initial norm."""

    factor: float
    radius: Rates = field(default_factory=dict)
    start: Points = field(default_factory=dict)
    lr: Rates = field(default_factory=dict)

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        if not self.radius:
            self.radius = {n: self.factor * float(np.linalg.norm(x)) for n, x in points.items()}
        self.start, self.lr = super().before(points, gradients, lr), lr
        return self.start

    def after(self, points: Points) -> Points:
        result = dict(points)
        for n, x in self.start.items():
            u = x - points[n]
            y = x - self.lr[n] * self.radius[n] * u / np.linalg.norm(u)
            result[n] = self.radius[n] * y / np.linalg.norm(y)
        return result
