"""All parts of a training, in the one order in which they act at each moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nnunet_cpr.nnunet.parts.average import Average
from nnunet_cpr.nnunet.parts.part import Part
from nnunet_cpr.nnunet.parts.progress import Progress
from nnunet_cpr.nnunet.parts.record import Record
from nnunet_cpr.nnunet.parts.regularization import Regularization
from nnunet_cpr.nnunet.parts.saves import Saves
from nnunet_cpr.nnunet.parts.schedule import Schedule
from nnunet_cpr.nnunet.parts.seeds import Seeds
from nnunet_cpr.nnunet.parts.settings import Settings
from nnunet_cpr.nnunet.parts.weights import Weights


class Parts:
    """Parts of a training.

    Attributes:
        other: the first base class of the trainer that is not from this package.
    """

    def __init__(self, trainer: Any, other: type) -> None:
        self.other = other
        self.saves = Saves(trainer, self)  # first, since another process may have the folder
        self.seeds = Seeds(trainer, self)
        # What trains: the settings before the optimizer that has them, the weights before bounds of
        # initial weights and before their average.
        self.settings = Settings(trainer, self)
        self.weights = Weights(trainer, self)
        self.regularization = Regularization(trainer, self)
        self.schedule = Schedule(trainer, self)
        self.average = Average(trainer, self)
        # What is written of it, once all others agree.
        self.record = Record(trainer, self)
        self.progress = Progress(trainer, self)

    def __iter__(self) -> Iterator[Part]:
        return (part for part in vars(self).values() if isinstance(part, Part))
