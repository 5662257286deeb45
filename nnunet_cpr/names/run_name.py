"""Names of runs outside of nnU-Net: ``AdamCPR_ws1000_lr1en3_seed1``.

A name holds the optimizer, the regularization and the seed of a run; the task
(:mod:`nnunet_cpr.vision.task`) provides the other settings. The folder of the run is named after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nnunet_cpr.names.families import MUON_MOMENTUM, Family
from nnunet_cpr.names.suffixes import METHOD_SUFFIXES, number
from nnunet_cpr.names.trainer_name import TrainerName, parse_name
from nnunet_cpr.names.training import BaseValues, Training, resolve
from nnunet_cpr.spelling import WrongName

_MOMENTA = {"sgd": 0.9, "muon": MUON_MOMENTUM}


def _family(name: str) -> Family:
    optimizer = name.removesuffix("CPR").removesuffix("W").lower()
    return Family(name, optimizer, cpr=name.endswith("CPR"), momentum=_MOMENTA.get(optimizer))


RUN_FAMILIES = {
    name: _family(name)
    for name in ("AdamCPR", "SGDCPR", "MuonCPR", "TimmCPR", "AdamW", "SGD", "Muon", "AMOS", "Timm")
}
RUN_SUFFIXES = (*METHOD_SUFFIXES, number("steps", "optimizer steps", "<N>steps"))


@dataclass(frozen=True)
class RunName(TrainerName):
    """Settings of a run; None stands for the default of the task.

    Attributes:
        steps: number of optimizer steps.

    Raises:
        WrongName: a value is out of range, or settings contradict each other.
    """

    families = RUN_FAMILIES
    suffixes = RUN_SUFFIXES
    prefix = ""
    defaults_follow_length = False  # tasks have their own

    steps: int | None = None

    @property
    def training(self) -> Training:
        steps = self.steps or 10**9  # until a task completes the name
        return resolve(self, BaseValues(epochs=1, iterations=steps))


def parse_run_name(name: str) -> RunName:
    """Parse the name of a run.

    Raises:
        WrongName: it is not one.

    Example:
        >>> parse_run_name("AdamCPR_ws2000_seed1").kappa
        KappaWS(steps=2000)
    """
    parsed = parse_name(RunName, name)
    if parsed is None:
        raise WrongName(f"unknown run {name!r}", f"its name begins with {', '.join(RUN_FAMILIES)}")
    return parsed
