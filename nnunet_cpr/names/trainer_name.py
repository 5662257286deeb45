"""Names of nnU-Net trainers: ``nnUNetTrainerCPR_ws2000_100epochs_on_nnUNetTrainerDA5``.

A name is a family, its suffixes, and last ``_on_`` and the class name of another trainer of nnU-Net, if
the training shall be like that trainer's except for the optimizer or its regularization.

nnU-Net's command has no option for the settings of a trainer, names result folders after the trainer and
searches for it by name at inference. The name therefore holds the settings. This module does not import
nnU-Net.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nnunet_cpr._spelling import OTHER_TRAINER
from nnunet_cpr.names import METHOD_SUFFIXES, Family, MethodName, Suffix, WrongName, count
from nnunet_cpr.names.parsing import parse_name

DEFAULT_EPOCHS = 1000
DEFAULT_ITERATIONS = 250
DEFAULT_LR = 1e-2
DEFAULT_WEIGHT_DECAY = 3e-5
MUON_LR = 3e-3

FAMILIES = {
    family.name: family
    for family in (
        Family("nnUNetTrainerCPR", "sgd", cpr=True, title="nnU-Net's SGD with CPR"),
        Family("nnUNetTrainerAdamCPR", "adam", cpr=True, warmup=2000, title="Adam with CPR"),
        Family(
            "nnUNetTrainerMuonCPR",
            "muon",
            cpr=True,
            warmup=2000,
            lr=MUON_LR,
            title="Muon with CPR",
        ),
        Family("nnUNetTrainerSGD", "sgd", title="nnU-Net's SGD with weight decay"),
        Family("nnUNetTrainerAdamW", "adam", warmup=2000, title="Adam with decoupled weight decay"),
        Family(
            "nnUNetTrainerMuon",
            "muon",
            warmup=2000,
            lr=MUON_LR,
            title="Muon with decoupled weight decay",
        ),
        Family("nnUNetTrainerAMOS", "amos", warmup=2000, lr=1e-3, title="AMOS, with its own decay"),
        Family(
            "nnUNetTrainerAttachCPR", "other", cpr=True, title="the other trainer's optimizer with CPR"
        ),
        Family("nnUNetTrainerPlain", "other", title="the other trainer, unchanged, with suffixes"),
    )
}

SUFFIXES: tuple[Suffix, ...] = (
    *METHOD_SUFFIXES,
    count("epochs", "epochs", "", "epochs"),
    count("iterations", "iterations per epoch", "", "iters"),
)
"""All suffixes of trainer names."""


@dataclass(frozen=True)
class TrainerName(MethodName):
    """Settings of a trainer; None stands for the default of the family.

    Attributes:
        epochs: number of epochs.
        iterations: optimizer steps per epoch.
        on: class name of the trainer that this one shall be like.

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
    on: str | None = None

    @classmethod
    def split(cls, name: str) -> tuple[str, str, str]:
        return name.partition(OTHER_TRAINER)

    def _check_values(self) -> None:
        super()._check_values()
        if self.keeps_optimizer and self.warmup is not None:
            raise WrongName(
                f"{self.family} keeps the other trainer's learning-rate schedule; leave out "
                f"_warmup{self.warmup}"
            )
        if self.on is None:
            return
        if OTHER_TRAINER in self.on:
            raise WrongName(f"expected one {OTHER_TRAINER}<Trainer>, got two; keep one of them")
        if not self.on.isidentifier() or "__" in f"_{self.on}":
            raise WrongName(
                f"expected the class name of a trainer after {OTHER_TRAINER}, without leading or double "
                f"underscores, which nnU-Net's folder names cannot contain, got {self.on!r}"
            )
        if self.on.partition("_")[0] in FAMILIES:
            raise WrongName(
                f"{self.on} is a trainer of nnunet-cpr, expected another one; write all settings "
                f"before {OTHER_TRAINER}"
            )

    def __str__(self) -> str:
        return super().__str__() + ("" if self.on is None else OTHER_TRAINER + self.on)

    @property
    def keeps_optimizer(self) -> bool:
        """True if the training uses the optimizer of the other trainer."""
        return self.defaults.optimizer == "other"

    @property
    def total_steps(self) -> int:
        return (self.epochs or DEFAULT_EPOCHS) * (self.iterations or DEFAULT_ITERATIONS)


def parse_trainer_name(name: str) -> TrainerName | None:
    """Parse the name of a trainer.

    Returns:
        The settings; None if the name does not resemble a trainer of this package.

    Raises:
        WrongName: the name is misspelt, or its settings contradict each other.

    Example:
        >>> parse_trainer_name("nnUNetTrainerCPR_100epochs_on_nnUNetTrainerDA5").on
        'nnUNetTrainerDA5'
        >>> parse_trainer_name("nnUNetTrainerDA5") is None
        True
    """
    return parse_name(TrainerName, name)
