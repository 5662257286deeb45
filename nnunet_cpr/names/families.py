"""Families of trainers: the first part of a name, and its default settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MUON_LR = 3e-3
MUON_MOMENTUM = 0.95
"""Defaults of :class:`~nnunet_cpr.optimizers.Muon`, whose module imports torch."""


@dataclass(frozen=True)
class Family:
    """First part of a name, with its default settings.

    Attributes:
        name: the first part itself.
        optimizer: ``sgd``, ``adam``, ``muon``, ``amos``, or ``other`` for that of the base trainer.
        title: the family in a few words.
        cpr: True if it trains with CPR.
        warmup: longest learning-rate warm-up without a suffix, in steps.
        lr: highest learning rate without a suffix.
        momentum: coefficient of the momentum without a suffix; None for an optimizer without one, or
            with a default of its own.
    """

    name: str
    optimizer: str
    title: str = ""
    cpr: bool = False
    warmup: int = 0
    lr: float = 1e-2
    momentum: float | None = None

    @property
    def keeps_optimizer(self) -> bool:
        """True if the training uses the optimizer of the base trainer, with its schedule."""
        return self.optimizer == "other"


_SGD: dict[str, Any] = {"momentum": 0.99}
_ADAM: dict[str, Any] = {"warmup": 2000}
_MUON: dict[str, Any] = {"warmup": 2000, "lr": MUON_LR, "momentum": MUON_MOMENTUM}

FAMILIES = {
    family.name: family
    for family in (
        Family("nnUNetTrainerCPR", "sgd", "nnU-Net's SGD with CPR", cpr=True, **_SGD),
        Family("nnUNetTrainerAdamCPR", "adam", "Adam with CPR", cpr=True, **_ADAM),
        Family("nnUNetTrainerMuonCPR", "muon", "Muon with CPR", cpr=True, **_MUON),
        Family("nnUNetTrainerSGD", "sgd", "nnU-Net's SGD with weight decay", **_SGD),
        Family("nnUNetTrainerAdamW", "adam", "Adam with decoupled weight decay", **_ADAM),
        Family("nnUNetTrainerMuon", "muon", "Muon with decoupled weight decay", **_MUON),
        Family("nnUNetTrainerAMOS", "amos", "AMOS, with its own decay", warmup=2000, lr=1e-3),
        Family("nnUNetTrainerTimm", "timm", "an optimizer of timm, such as _lion", warmup=2000),
        Family("nnUNetTrainerTimmCPR", "timm", "an optimizer of timm with CPR", cpr=True, warmup=2000),
        Family("nnUNetTrainerAttachCPR", "other", "the other trainer's optimizer with CPR", cpr=True),
        Family("nnUNetTrainerPlain", "other", "the other trainer, unchanged, with suffixes"),
    )
}
