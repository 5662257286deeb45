"""Trainer families: the first part of a name, with the default settings."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_EPOCHS = 1000
DEFAULT_ITERATIONS = 250
DEFAULT_LR = 1e-2
DEFAULT_WEIGHT_DECAY = 3e-5
MUON_LR = 3e-3


@dataclass(frozen=True)
class Family:
    """First part of a name, with its default settings.

    Attributes:
        name: the first part itself.
        optimizer: ``sgd``, ``adam``, ``muon``, ``amos``, or ``other`` for that of the base trainer.
        title: the family in a few words.
        cpr: True if it trains with CPR.
        warmup: steps of learning-rate warm-up.
        lr: highest learning rate.
    """

    name: str
    optimizer: str
    title: str = ""
    cpr: bool = False
    warmup: int = 0
    lr: float = 1e-2


FAMILIES = {
    family.name: family
    for family in (
        Family("nnUNetTrainerCPR", "sgd", "nnU-Net's SGD with CPR", cpr=True),
        Family("nnUNetTrainerAdamCPR", "adam", "Adam with CPR", cpr=True, warmup=2000),
        Family("nnUNetTrainerMuonCPR", "muon", "Muon with CPR", cpr=True, warmup=2000, lr=MUON_LR),
        Family("nnUNetTrainerSGD", "sgd", "nnU-Net's SGD with weight decay"),
        Family("nnUNetTrainerAdamW", "adam", "Adam with decoupled weight decay", warmup=2000),
        Family("nnUNetTrainerMuon", "muon", "Muon with decoupled weight decay", warmup=2000, lr=MUON_LR),
        Family("nnUNetTrainerAMOS", "amos", "AMOS, with its own decay", warmup=2000, lr=1e-3),
        Family("nnUNetTrainerTimm", "timm", "an optimizer of timm, such as _lion", warmup=2000),
        Family("nnUNetTrainerTimmCPR", "timm", "an optimizer of timm with CPR", cpr=True, warmup=2000),
        Family("nnUNetTrainerAttachCPR", "other", "the other trainer's optimizer with CPR", cpr=True),
        Family("nnUNetTrainerPlain", "other", "the other trainer, unchanged, with suffixes"),
    )
}
