"""Names of runs outside of nnU-Net: ``AdamCPR_ws1000_lr1en3_seed1``.

A name holds the optimizer, the regularization and the seed of a run; the task
(:mod:`nnunet_cpr.vision.task`) provides the other settings. The folder of the run is named after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nnunet_cpr.names.settings_and_defaults import Family, TrainerName
from nnunet_cpr.names.suffixes import METHOD_SUFFIXES, number
from nnunet_cpr.names.trainer_name import parse_name
from nnunet_cpr.spelling import WrongName

RUN_FAMILIES = {
    name: Family(name, name.removesuffix("CPR").removesuffix("W").lower(), cpr=name.endswith("CPR"))
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
    def total_steps(self) -> int:
        return self.steps or 10**9  # until a task completes the name


def parse_run_name(name: str) -> RunName:
    """Parse the name of a run.

    Raises:
        WrongName: it is not one.

    Example:
        >>> parse_run_name("AdamCPR_ws2000_seed1").bound
        KappaWS(steps=2000)
    """
    parsed = parse_name(RunName, name)
    if parsed is None:
        raise WrongName(f"unknown run {name!r}", f"its name begins with {', '.join(RUN_FAMILIES)}")
    return parsed
