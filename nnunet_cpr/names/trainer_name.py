"""Trainer names that carry their settings: ``nnUNetTrainerCPR_ws2000_warmup2000_100epochs``.

nnU-Net's command takes a trainer's name and no other options, names its result folders after it, and
finds the trainer again by it at inference. So the settings stand in the name, by the grammar of
:mod:`nnunet_cpr.names`. This module does not import nnU-Net.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nnunet_cpr.names import METHOD_SUFFIXES, Family, MethodName, Suffix, count
from nnunet_cpr.names.parsing import parse

DEFAULT_EPOCHS = 1000
DEFAULT_ITERATIONS = 250
STEPS_AFTER_WARMUP = 1000
"""The paper's best warm start on average: this many steps after the learning-rate warm-up."""

FAMILIES = {
    family.name: family
    for family in (
        Family("nnUNetTrainerCPR", "sgd", cpr=True),
        Family("nnUNetTrainerAdamCPR", "adam", cpr=True, warmup=2000),
        Family("nnUNetTrainerSGD", "sgd"),
        Family("nnUNetTrainerAdamW", "adam", warmup=2000),
        Family("nnUNetTrainerAMOS", "amos", warmup=2000, lr=1e-3),
    )
}

SUFFIXES: tuple[Suffix, ...] = (
    *METHOD_SUFFIXES,
    count("epochs", "", "epochs"),
    count("iterations", "", "iters"),
)
"""The whole grammar of trainer names."""


@dataclass(frozen=True)
class TrainerName(MethodName):
    """A trainer family and its settings; None means the family's own.

    Raises:
        WrongName: settings that contradict each other.
    """

    families: ClassVar[dict[str, Family]] = FAMILIES
    suffixes: ClassVar[tuple[Suffix, ...]] = SUFFIXES
    prefix: ClassVar[str] = "nnUNetTrainer"

    epochs: int | None = None
    iterations: int | None = None

    @property
    def total_steps(self) -> int:
        return (self.epochs or DEFAULT_EPOCHS) * (self.iterations or DEFAULT_ITERATIONS)

    @property
    def default_warm_start(self) -> int:
        return self.warmup_steps + STEPS_AFTER_WARMUP


def parse_trainer_name(name: str) -> TrainerName | None:
    """The settings in a trainer's name, or None where the name is not one of ours, nor meant to be.

    Raises:
        WrongName: the name is almost one of ours.
    """
    return parse(TrainerName, name)
