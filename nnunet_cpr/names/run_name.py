"""Names of runs outside of nnU-Net: ``AdamCPR_ws1000_lr1en3_seed1``.

A name holds the optimizer, the regularization and the seed of a run; the task
(:mod:`nnunet_cpr.vision.task`) provides the other settings. The folder of the run is named after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nnunet_cpr.names import METHOD_SUFFIXES, Family, MethodName, Suffix, WrongName, count
from nnunet_cpr.names.parsing import parse_name

FAMILIES = {
    family.name: family
    for family in (
        Family("AdamCPR", "adam", cpr=True),
        Family("SGDCPR", "sgd", cpr=True),
        Family("MuonCPR", "muon", cpr=True),
        Family("AdamW", "adam"),
        Family("SGD", "sgd"),
        Family("Muon", "muon"),
        Family("AMOS", "amos"),
    )
}

SUFFIXES: tuple[Suffix, ...] = (*METHOD_SUFFIXES, count("steps", "optimizer steps", "", "steps"))

_UNKNOWN_STEPS = 10**9  # until a task completes the name


@dataclass(frozen=True)
class RunName(MethodName):
    """Settings of a run; None stands for the default of the task.

    Attributes:
        steps: number of optimizer steps.

    Raises:
        WrongName: a value is out of range, or settings contradict each other.
    """

    families: ClassVar[dict[str, Family]] = FAMILIES
    suffixes: ClassVar[tuple[Suffix, ...]] = SUFFIXES

    steps: int | None = None

    @property
    def total_steps(self) -> int:
        return self.steps or _UNKNOWN_STEPS


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
        raise WrongName(f"unknown run {name!r}; its name begins with {', '.join(FAMILIES)}")
    return parsed
