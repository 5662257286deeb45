"""Small trainings of every kind that can be stopped after any step and resumed.

A case is plain data, so that another process can be told of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.baselines import WeightNormControl
from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.cpr.bounds import Bound
from nnunet_cpr.optimizers import FusedAdam, FusedSGD, Muon, kernels
from tests.helpers.baseline_kinds import KINDS
from tests.optimizers.fused.stepping import use

STEPS = 14
CHUNK = 64  # elements, so that a matrix has several chunks

# Optimizers that a regularizer is attached to.
TORCH: dict[str, Any] = {
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, **o),
    "sgd-fused": lambda p, **o: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True, **o),
    "sgd-bare": lambda p, **o: torch.optim.SGD(p, lr=0.05, **o),
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=0.02, weight_decay=0, eps=1e-4, **o),
    "adam-fused": lambda p, **o: torch.optim.Adam(p, lr=0.02, eps=1e-4, fused=True, **o),
    "nadam": lambda p, **o: torch.optim.NAdam(p, lr=0.02, eps=1e-4, **o),
    "Muon": lambda p, **o: Muon(p, lr=0.02, eps=1e-4, **o),
    "FusedSGD": lambda p, **o: FusedSGD(p, lr=0.05, momentum=0.9, **o),
    "FusedAdam": lambda p, **o: FusedAdam(p, lr=0.02, eps=1e-4, **o),
    "lbfgs": lambda p, **o: torch.optim.LBFGS(p, lr=1e-3, max_iter=3, history_size=4, **o),
}
# Ours, and whether their step is torch's fused one, which the one-pass step needs.
OURS: dict[str, Any] = {
    "SGDCPR": lambda m, **o: SGDCPR(m, lr=0.05, **o),
    "SGDCPR-bare": lambda m, **o: SGDCPR(m, lr=0.05, momentum=0, nesterov=False, **o),
    "SGDCPR-unfused": lambda m, **o: SGDCPR(m, lr=0.05, fused=False, **o),
    "AdamCPR": lambda m, **o: AdamCPR(m, lr=0.02, eps=1e-4, **o),
    "AdamCPR-amsgrad": lambda m, **o: AdamCPR(m, lr=0.02, eps=1e-4, amsgrad=True, **o),
    "AdamCPR-unfused": lambda m, **o: AdamCPR(m, lr=0.02, eps=1e-4, fused=False, **o),
    "MuonCPR": lambda m, **o: MuonCPR(m, lr=0.02, eps=1e-4, **o),
}
BASELINES: dict[str, Any] = {**KINDS, "normws": lambda m: WeightNormControl(m, 0.5, start=3)}


@dataclass(frozen=True)
class Case:
    """Settings of a training."""

    optimizer: str = "SGDCPR"
    baseline: str | None = None
    bound: Bound | str = "ws3"
    regularizer: str = "l2"
    adaptive: bool = False
    dtype: str = "float32"
    backend: str = "chosen"
    """``chosen`` by the optimizer, or ``plain`` (unfused)."""
    channels_last: bool = False
    closure: bool = False
    breaks_at: int | None = None
    """Step at which one matrix becomes infinite."""
    scaler: bool = False
    """Train with a GradScaler, some of whose steps overflow."""


class Training:
    """Training of a case."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case = case
        dtype = getattr(torch, case.dtype)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 5, 3),
            torch.nn.BatchNorm2d(5),
            torch.nn.Conv2d(5, 4, 3),
            torch.nn.Linear(20, 9),
            torch.nn.Linear(4, 4),
        ).to(dtype)
        if case.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.optimizer = self._build()
        self.attached: Any = attached_method(self.optimizer)
        if case.backend != "chosen":
            use(self.optimizer, case.backend)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=case.scaler)
        self.scaler.scale(torch.zeros(()))  # else it has no scale yet
        # Gradients lead outwards from there, so that bounds are reached; they know of no rounding.
        generator = torch.Generator().manual_seed(1)
        self._start = [
            torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for p in self.model.parameters()
        ]

    def _build(self) -> torch.optim.Optimizer:
        case, model = self.case, self.model
        if case.baseline is not None:
            return BASELINES[case.baseline](model).attach(TORCH[case.optimizer](model.parameters()))
        settings = {
            "kappa": case.bound,
            "regularizer": case.regularizer,
            "adaptive": case.adaptive,
            "mu": 0.05,
        }
        if case.optimizer in OURS:
            return OURS[case.optimizer](model, **settings)
        return CPR(model, **settings).attach(TORCH[case.optimizer](model.parameters()))

    # Steps

    def set_gradients(self, t: int) -> None:
        generator = torch.Generator().manual_seed(100 + t)
        for i, (p, start) in enumerate(zip(self.model.parameters(), self._start)):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = (0.3 * noise - 0.4 * start).to(p)
            if (t, i) in {(2, 0), (7, 4)}:
                p.grad = None
        if t == self.case.breaks_at:
            self.model[4].weight.grad = torch.full_like(self.model[4].weight, torch.inf)

    def _loss(self, t: int) -> torch.Tensor:
        if self.case.optimizer == "lbfgs":  # asks at several points
            self.optimizer.zero_grad()
            loss = sum((p - 1).pow(4).mean() for p in self.model.parameters())
            loss.backward()
            return loss.detach()
        self.set_gradients(t)
        return torch.tensor(1.0 + t)

    def step(self, t: int) -> None:
        if self.case.optimizer == "lbfgs" or self.case.closure:
            assert self.optimizer.step(lambda: self._loss(t)) is not None
        elif self.case.scaler:
            self._scaled_step(t)
        else:
            self.set_gradients(t)
            self.optimizer.step()
        self.scheduler.step()

    def _scaled_step(self, t: int) -> None:
        self.set_gradients(t)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad *= self.scaler.get_scale()
        if t in (1, 6, 10):
            self.model[2].weight.grad[0, 0] = torch.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, begin: int, end: int = STEPS) -> None:
        for t in range(begin, end):
            self.step(t)

    # State

    def state(self) -> dict[str, Any]:
        parts = ("model", "optimizer", "scheduler", "scaler")
        return {part: getattr(self, part).state_dict() for part in parts}

    def save(self, path: Path) -> None:
        torch.save(self.state(), path)

    def load(self, path: Path, **options: Any) -> None:
        self.load_state(torch.load(path, weights_only=True, **options))

    def load_state(self, state: dict[str, Any]) -> None:
        for part, value in state.items():
            getattr(self, part).load_state_dict(value)


def split_small_matrices() -> None:
    """Prepare a process that resumes trainings: CPU kernels split small matrices."""
    kernels.CHUNK = CHUNK
    torch.set_num_threads(1)


def resume(
    case: Case, checkpoint: Path, result: Path, begin: int, again_at: int | None, **options: Any
) -> None:
    """Continue a training from a checkpoint before step ``begin``, and save its final state."""
    training = Training(case, seed=77)  # other weights, which loading replaces
    training.load(checkpoint, **options)
    if again_at is not None:  # and is interrupted once more
        training.run(begin, again_at)
        # To another file: with mmap a torch optimizer's state still lies in the first one.
        training.save(result)
        training, begin = Training(case, seed=78), again_at
        training.load(result)
    training.run(begin)
    training.save(result)
