"""Algorithms of the paper in NumPy and float64, independent of the package.

Per-element measures and gradients, as docs/concepts/how-cpr-works.md explains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


def measure(name: str, x: Array) -> float:
    if name == "l2":
        return float(np.mean(x**2))
    if name == "l1":
        return float(np.mean(np.abs(x)))
    if name == "std":
        return float(np.std(x, ddof=1))
    if name == "huber":
        a = np.abs(x)
        return float(np.mean(np.where(a < 1, a**2 / 2, a - 0.5)))
    raise AssertionError(name)


def direction(name: str, x: Array) -> Array:
    if name == "l2":
        return 2 * x
    if name == "l1":
        return np.sign(x)
    if name == "std":
        return (x - x.mean()) / ((x.size - 1) * np.std(x, ddof=1))
    if name == "huber":
        return np.where(np.abs(x) < 1, x, np.sign(x))
    raise AssertionError(name)


@dataclass
class OracleCPR:
    """Algorithm 1 in plain loops over the matrices."""

    bound: tuple  # ("k", value) | ("ki0", factor) | ("ws", steps) | ("ip", interval, ema)
    regularizer: str
    mu: float
    adaptive: bool
    t: int = 0
    kappa: dict = field(default_factory=dict)
    lam: dict = field(default_factory=dict)
    began_before: dict = field(default_factory=dict)  # the multiplier the step before began with
    samples: dict = field(default_factory=dict)

    def correction(self, params: dict[str, Array], has_grad: dict[str, bool]) -> dict[str, Array]:
        """Return the correction to subtract from each parameter."""
        out = {}
        for name, x in params.items():
            r = measure(self.regularizer, x)
            self._find_bound(name, r)
            began = self.lam.setdefault(name, 0.0)
            if not has_grad[name]:
                continue
            self.lam[name] = max(0.0, began + self.mu * (r - self.kappa.get(name, math.inf)))
            used = min(self.lam[name], 0.5) if self.regularizer == "l2" else self.lam[name]
            out[name] = used * direction(self.regularizer, x)
            if self.adaptive:
                if began == 0 and self.began_before.get(name, 0.0) > 0:
                    self.kappa[name] = r
                self.began_before[name] = began
        self.t += 1
        return out

    def _find_bound(self, name: str, r: float) -> None:
        kind, value = self.bound[0], self.bound[1]
        if name in self.kappa and kind != "ip":
            return
        if kind == "k":
            self.kappa[name] = value
        elif kind == "ki0":
            self.kappa[name] = value * r
        elif kind == "ws" and self.t == value:
            self.kappa[name] = r
        elif kind == "ip" and self.t % value == 0:
            seen = self.samples.setdefault(name, [])
            ema = self.bound[2]
            seen.append(ema * seen[-1] + (1 - ema) * r if seen else r)
            if name not in self.kappa and len(seen) >= 3 and seen[-1] - 2 * seen[-2] + seen[-3] < 0:
                self.kappa[name] = r


@dataclass
class OracleSGD:
    lr: float
    momentum: float
    buffer: dict = field(default_factory=dict)

    def move(self, name: str, g: Array) -> Array:
        b = self.buffer.get(name)
        b = g if b is None else self.momentum * b + g
        self.buffer[name] = b
        return -self.lr * (g + self.momentum * b)  # Nesterov


NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients a, b, c of each iteration: the tuned quintic of modded-nanogpt's train_gpt_medium.py."""


def newton_schulz(matrix: Array) -> Array:
    """Return the matrix with all singular values close to 1."""
    x = matrix / max(np.linalg.norm(matrix), 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        x = (u * (a * s + b * s**3 + c * s**5)) @ vt
    return x


@dataclass
class OracleMuon:
    """Muon with updates as large as AdamW's; ``transposed`` has the input channels first."""

    lr: float
    momentum: float
    nesterov: bool = False
    transposed: tuple = ()
    buffer: dict = field(default_factory=dict)

    def move(self, name: str, g: Array) -> Array:
        b = self.momentum * self.buffer.get(name, 0.0) + (1 - self.momentum) * g
        self.buffer[name] = b
        wanted = self.momentum * b + (1 - self.momentum) * g if self.nesterov else b
        if name in self.transposed:
            wanted = wanted.swapaxes(0, 1)
        matrix = wanted.reshape(wanted.shape[0], -1)
        move = newton_schulz(matrix) * 0.2 * math.sqrt(max(matrix.shape))
        move = move.reshape(wanted.shape)
        return -self.lr * (move.swapaxes(0, 1) if name in self.transposed else move)


@dataclass
class OracleAdam:
    lr: float
    betas: tuple[float, float]
    eps: float = 1e-8
    state: dict = field(default_factory=dict)

    def move(self, name: str, g: Array) -> Array:
        m, v, k = self.state.get(name, (0.0, 0.0, 0))
        b1, b2 = self.betas
        m, v, k = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2, k + 1
        self.state[name] = (m, v, k)
        return -self.lr * (m / (1 - b1**k)) / (np.sqrt(v / (1 - b2**k)) + self.eps)


@dataclass
class OracleLion:
    lr: float
    betas: tuple[float, float]
    average: dict = field(default_factory=dict)

    def move(self, name: str, g: Array) -> Array:
        m = self.average.get(name, 0.0)
        b1, b2 = self.betas
        self.average[name] = b2 * m + (1 - b2) * g
        return -self.lr * np.sign(b1 * m + (1 - b1) * g)
