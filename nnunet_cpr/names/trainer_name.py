"""Names of nnU-Net trainers: ``nnUNetTrainerCPR_ws2000_warmup2000_100epochs``.

nnU-Net's command has no option for the settings of a trainer, names result folders after the trainer and
searches for it by name at inference. The name therefore holds the settings. This module does not import
nnU-Net.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nnunet_cpr.names import METHOD_SUFFIXES, Family, MethodName, Suffix, count
from nnunet_cpr.names.parsing import parse_name

DEFAULT_EPOCHS = 1000
DEFAULT_ITERATIONS = 250
STEPS_AFTER_WARMUP = 1000
"""Steps from the learning-rate warm-up to the warm start of kappa, the best on average in the paper."""

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
"""All suffixes of trainer names."""


@dataclass(frozen=True)
class TrainerName(MethodName):
    """Settings of a trainer; None stands for the default of the family.

    Attributes:
        epochs: number of epochs.
        iterations: optimizer steps per epoch.

    Raises:
        WrongName: a value is out of range, or settings contradict each other.

    Example:
        >>> str(TrainerName("nnUNetTrainerCPR", mu=0.5, epochs=100))
        'nnUNetTrainerCPR_mu0p5_100epochs'
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
    """Parse the name of a trainer.

    Returns:
        The settings; None if the name does not resemble a trainer of this package.

    Raises:
        WrongName: the name is misspelt, or its settings contradict each other.

    Example:
        >>> parse_trainer_name("nnUNetTrainerCPR_100epochs").epochs
        100
        >>> parse_trainer_name("nnUNetTrainerDA5") is None
        True
    """
    return parse_name(TrainerName, name)
