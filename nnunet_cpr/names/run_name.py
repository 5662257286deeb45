"""Names of runs: ``AdamCPR_ws1000_lr1en3_seed1``, by the grammar that nnU-Net's trainers have here.

A run's name says its optimizer, its regularizer and its seed; what it does not say comes from the task
(:mod:`nnunet_cpr.vision.task`). Its folder is named after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nnunet_cpr.names import METHOD_SUFFIXES, Family, MethodName, Suffix, WrongName, count
from nnunet_cpr.names.parsing import parse

FAMILIES = {
    family.name: family
    for family in (
        Family("AdamCPR", "adam", cpr=True),
        Family("SGDCPR", "sgd", cpr=True),
        Family("AdamW", "adam"),
        Family("SGD", "sgd"),
        Family("AMOS", "amos"),
    )
}

SUFFIXES: tuple[Suffix, ...] = (*METHOD_SUFFIXES, count("steps", "", "steps"))

_UNKNOWN = 10**9  # of a name that no task has completed yet


@dataclass(frozen=True)
class RunName(MethodName):
    """An optimizer, its regularizer and seed; None means the task's own.

    Raises:
        WrongName: settings that contradict each other.
    """

    families: ClassVar[dict[str, Family]] = FAMILIES
    suffixes: ClassVar[tuple[Suffix, ...]] = SUFFIXES

    steps: int | None = None

    @property
    def total_steps(self) -> int:
        return self.steps or _UNKNOWN

    @property
    def default_warm_start(self) -> int:
        """Twice the learning-rate warm-up, the paper's best choice in its vision experiments."""
        return 2 * self.warmup_steps or 1000


def parse_run_name(name: str) -> RunName:
    """The settings in a run's name.

    Raises:
        WrongName: it is none.
    """
    parsed = parse(RunName, name)
    if parsed is None:
        raise WrongName(f"{name!r} is no run; its name begins with {', '.join(FAMILIES)}")
    return parsed
