"""Optimizers with CPR in fixed trainings of a few steps, and their state dicts.

This module also runs with version 0.1.0 of the package, so it imports the package in functions.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

STEPS_BEFORE = 6
"""Steps before a state is saved."""
STEPS_AFTER = 5
"""Steps after it is loaded."""


@dataclass(frozen=True)
class Case:
    """Optimizer and settings.

    Attributes:
        optimizer: name in ``nnunet_cpr``, or ``CPR-<name>`` for CPR attached to an optimizer of torch.
        bound: class name of the bound and its arguments.
        options: further arguments of the optimizer, of CPR if it is attached.
        groups: settings of the first and of the second parameter group; one group without them.
        scale: size of the weights.
        skips: True if a matrix has no gradient in every second step.
    """

    optimizer: str
    bound: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ()
    scale: float = 0.3
    skips: bool = False

    @property
    def name(self) -> str:
        """Name of the case in files and tests."""
        words = [self.optimizer, "".join(map(str, self.bound)).removeprefix("Kappa")]
        words += [f"{key}={value}" for key, value in self.options.items()]
        words += [word for word in ("groups", "skips") if getattr(self, word)]
        return "-".join(words)


BOUNDS = {
    "K": ("KappaK", 0.01),
    "KI0": ("KappaKI0", 1.02),
    "WS set": ("KappaWS", 3),
    "WS to come": ("KappaWS", 8),
    "IP": ("KappaIP", 1),
    "IP ema": ("KappaIP", 1, 0.5),
}
_GROUPS = (
    {"lr": 0.02, "kappa": ("KappaK", 0.02), "mu": 3.0},
    {"kappa": ("KappaWS", 4), "regularizer": "std", "adaptive": True},
)


def old_cases() -> Iterator[Case]:
    """Yield the cases that version 0.1.0 has as well."""
    for optimizer in ("SGDCPR", "AdamCPR"):
        for fused in (False, True):
            for bound in BOUNDS.values():
                yield Case(optimizer, bound, {"fused": fused})
            yield Case(optimizer, BOUNDS["KI0"], {"fused": fused, "adaptive": True, "mu": 20.0})
        yield Case(optimizer, BOUNDS["WS set"], {"regularizer": "l1"})
        for fused in (False, True):
            # Multipliers on both sides of 0.5, the largest that is applied.
            yield Case(optimizer, BOUNDS["K"], {"fused": fused, "mu": 0.5}, scale=1.5)
            yield Case(optimizer, BOUNDS["WS set"], {"fused": fused}, skips=True)
    yield Case("SGDCPR", BOUNDS["KI0"], {"momentum": 0.0, "nesterov": False, "fused": True})
    yield Case("AdamCPR", BOUNDS["KI0"], {"amsgrad": True})
    for optimizer in ("CPR-AdamW", "CPR-SGD"):
        for bound in ("KI0", "WS set", "IP"):
            yield Case(optimizer, BOUNDS[bound])
        for regularizer in ("l1", "std"):
            yield Case(optimizer, BOUNDS["WS set"], {"regularizer": regularizer, "mu": 2.0})
        # Weights of more than 1, below which huber is quadratic.
        yield Case(optimizer, ("KappaK", 0.4), {"regularizer": "huber", "mu": 0.2}, scale=1.5)
        yield Case(optimizer, BOUNDS["KI0"], {"adaptive": True, "mu": 20.0})


def cases() -> Iterator[Case]:
    """Yield all cases."""
    yield from old_cases()
    for bound in BOUNDS.values():
        yield Case("MuonCPR", bound)
    yield Case("MuonCPR", BOUNDS["WS set"], {"adaptive": True, "regularizer": "std"})
    for optimizer in ("SGDCPR", "AdamCPR", "MuonCPR"):
        yield Case(optimizer, BOUNDS["WS set"], groups=_GROUPS)
    yield Case("CPR-AdamW", BOUNDS["WS set"], groups=_without(_GROUPS, "lr"))
    for coefficients in ("original", "polar_express"):
        yield Case("MuonCPR", BOUNDS["KI0"], {"ns_coefficients": coefficients})
    for optimizer in ("SGDCPR", "AdamCPR"):  # fused steps are for the regularization function l2
        groups = _without(_GROUPS, "regularizer")
        yield Case(optimizer, BOUNDS["WS set"], {"fused": True}, groups)


def _without(groups: tuple[dict[str, Any], ...], key: str) -> tuple[dict[str, Any], ...]:
    return tuple({k: v for k, v in group.items() if k != key} for group in groups)


class Training:
    """Small network in a training with fixed gradients.

    Attributes:
        optimizer: the optimizer.
        cpr: its CPR.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(6, 4)
        )
        with torch.no_grad():
            for j, p in enumerate(self.model.parameters()):
                p.copy_(case.scale * wave(p, 1.0 + j))
        self.optimizer, self.cpr = self._build()
        self.step_count = 0

    def _build(self) -> tuple[torch.optim.Optimizer, Any]:
        import nnunet_cpr

        case = self.case
        kind, _, other = case.optimizer.partition("-")
        settings = {"kappa": _bound(case.bound), "mu": 1.0, **case.options}
        if other:
            cpr = nnunet_cpr.CPR(self._parameters(), **settings)
            groups = [{"params": list(self.model.parameters())}]
            optimizer = getattr(torch.optim, other)(groups, lr=0.01, weight_decay=0.0)
            return cpr.attach(optimizer), cpr
        built = getattr(nnunet_cpr, kind)(self._parameters(), lr=0.01, **settings)
        return built, built.cpr

    def _parameters(self) -> Any:
        if not self.case.groups:
            return self.model
        named = list(self.model.named_parameters())
        settings = [
            {key: _bound(value) if key == "kappa" else value for key, value in group.items()}
            for group in self.case.groups
        ]
        return [{"params": half, **own} for half, own in zip((named[:4], named[4:]), settings)]

    def run(self, steps: int) -> Training:
        """Take steps with gradients that depend on the number of the step only."""
        for _ in range(steps):
            self.step_count += 1
            for j, p in enumerate(self.model.parameters()):
                # Weights grow, so that bounds are reached.
                growth = self.case.scale * wave(p, 1.0 + j)
                p.grad = 0.2 * wave(p, 0.7 * self.step_count + j) - 1.5 * growth / self.step_count
                if self.case.skips and j == 4 and self.step_count % 2 == 0:
                    p.grad = None
            self.optimizer.step()
        return self

    def save(self) -> dict[str, Any]:
        """Return what a checkpoint has."""
        buffer = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step_count,
            },
            buffer,
        )
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def load(self, saved: dict[str, Any]) -> Training:
        """Load a checkpoint."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step_count = saved["step"]
        return self

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters, bounds and multipliers."""
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        found["kappa"] = self.cpr.kappa.clone()
        found["lagrange_multiplier"] = self.cpr.lagrange_multiplier.clone()
        return found


def continued(case: Case, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the values after a continuation."""
    return Training(case).load(saved).run(STEPS_AFTER).values()


def layout(state: Any) -> Any:
    """Return keys, dtypes and shapes of a state dict, and plain values."""
    if isinstance(state, torch.Tensor):
        return [str(state.dtype).removeprefix("torch."), list(state.shape)]
    if isinstance(state, dict):
        return {str(key): layout(value) for key, value in state.items()}
    return state


def _bound(described: tuple[Any, ...]) -> Any:
    import nnunet_cpr

    return getattr(nnunet_cpr, described[0])(*described[1:])


def wave(p: torch.Tensor, phase: float) -> torch.Tensor:
    """Return fixed values in the shape of a tensor; in float64, whose sine is the same everywhere."""
    index = torch.arange(p.numel(), dtype=torch.float64)
    return torch.sin(1.7 * index + math.pi * phase).reshape(p.shape).to(p.dtype)
