"""What a name says: an optimizer, its regularizer and their settings."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nnunet_cpr._spelling import WrongName
from nnunet_cpr.baselines import BASELINES, Baseline, BaselineArgs
from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.names.suffixes import BaselineChoice, Suffix
from nnunet_cpr.param_groups import Params
from nnunet_cpr.regularizers import get_regularizer


@dataclass(frozen=True)
class Family:
    """What a name stands for before its suffixes change it."""

    name: str
    optimizer: str
    """``sgd``, ``adam`` or ``amos``."""
    cpr: bool = False
    warmup: int = 0
    lr: float = 1e-2


@dataclass(frozen=True)
class MethodName(ABC):
    """An optimizer's family and settings; None means the family's own.

    ``str()`` gives the name, with the suffixes in the order of :attr:`suffixes`.

    Raises:
        WrongName: settings that contradict each other.
    """

    families: ClassVar[dict[str, Family]]
    suffixes: ClassVar[tuple[Suffix, ...]]
    prefix: ClassVar[str] = ""
    """What the names of all families begin with."""

    family: str
    kappa: Bound | None = None
    regularizer: str | None = None
    mu: float | None = None
    adaptive: bool = False
    baseline: BaselineChoice | None = None
    lr: float | None = None
    weight_decay: float | None = None
    warmup: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.family not in self.families:
            raise WrongName(f"no family is named {self.family!r}; there are {', '.join(self.families)}")
        self._check_values()
        self._check_regularizers()
        if self.warmup_steps >= self.total_steps:
            raise WrongName(
                f"the learning-rate warm-up of {self.warmup_steps} steps is not shorter than the "
                f"training of {self.total_steps} steps; choose a shorter one with _warmup<N>"
            )

    def _check_values(self) -> None:
        """What the grammar cannot spell must not be printed as something else."""
        if self.regularizer is not None:
            get_regularizer(self.regularizer)
        for name in ("mu", "lr", "weight_decay"):
            value = getattr(self, name)
            is_fine = value is None or 0 < value < math.inf or (name == "weight_decay" and value == 0)
            if not is_fine:
                raise WrongName(f"{name} must be positive and finite, got {value!r}")
        for suffix in self.suffixes:
            value = getattr(self, suffix.field)
            if suffix.smallest is None or value is None:
                continue
            if not suffix.smallest <= value < 10**9:
                raise WrongName(f"{suffix.field} must be at least {suffix.smallest}, got {value!r}")
        if self.baseline is not None:
            entry = BASELINES.get(self.baseline.keyword)
            value = self.baseline.value
            if entry is None or (entry.setting is None) != (value is None):
                raise WrongName(f"no name can say {self.baseline!r}")
            if value is not None and not 0 < value < math.inf:
                raise WrongName(f"{entry.keyword} must be positive and finite, got {value!r}")

    def _check_regularizers(self) -> None:
        given = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name)]
        of_cpr = [name for name in ("kappa", "regularizer", "mu", "adaptive") if name in given]
        if of_cpr and not self.defaults.cpr:
            twin = [
                f.name
                for f in self.families.values()
                if f.cpr and f.optimizer == self.defaults.optimizer
            ]
            advice = f"; the one with CPR is {twin[0]}" if twin else ""
            raise WrongName(f"{self.family} has no CPR, so {self._words(of_cpr)} has no meaning{advice}")
        others = [field for field in ("weight_decay", "baseline") if getattr(self, field) is not None]
        if others and self.defaults.cpr:
            raise WrongName(
                f"CPR takes the place of weight decay, so {self.family} takes no "
                f"{self._words(others)}; leave it out"
            )
        if self.baseline is None:
            return
        if self.defaults.optimizer == "amos":
            raise WrongName(
                f"{self.family} has a decay of its own, so it takes no {self._words(['baseline'])}; "
                "leave it out"
            )
        if self.weight_decay is not None and not BASELINES[self.baseline.keyword].decays:
            raise WrongName(
                f"{self._words(['baseline'])} takes the place of weight decay; leave out "
                f"{self._words(['weight_decay'])}"
            )

    def __str__(self) -> str:
        return "_".join([self.family, *(token for _, token in self._tokens())])

    @property
    def defaults(self) -> Family:
        return self.families[self.family]

    @property
    def decays(self) -> bool:
        """Whether a weight decay has a meaning."""
        return not self.defaults.cpr and (
            self.baseline is None or BASELINES[self.baseline.keyword].decays
        )

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Optimizer steps in the whole training."""

    @property
    @abstractmethod
    def default_warm_start(self) -> int:
        """Steps after which kappa is taken where the name gives no bound."""

    @property
    def warmup_steps(self) -> int:
        """Steps of the learning rate's linear warm-up."""
        return self.defaults.warmup if self.warmup is None else self.warmup

    @property
    def bound(self) -> Bound:
        """How kappa is found."""
        return self.kappa or KappaWS(self.default_warm_start)

    @property
    def cpr_settings(self) -> dict[str, Any]:
        """The keyword arguments for :class:`SGDCPR` and :class:`AdamCPR` that the name says."""
        return {
            "kappa": self.bound,
            "regularizer": self.regularizer or "l2",
            "mu": self.mu or 1.0,
            "adaptive": self.adaptive,
        }

    def build_baseline(self, params: Params, weight_decay: float) -> Baseline | None:
        """The baseline that the name says, not attached yet; None if it says none."""
        if self.baseline is None:
            return None
        training = BaselineArgs(params, weight_decay, self.total_steps)
        return BASELINES[self.baseline.keyword].build(training, self.baseline.value or 0.0)

    def _tokens(self) -> list[tuple[str, str]]:
        """(field, suffix without its underscore) for each setting that is given."""
        tokens = []
        for suffix in self.suffixes:
            value = getattr(self, suffix.field)
            text = None if value is None or value is False else suffix.write(value)
            if text is not None:
                tokens.append((suffix.field, suffix.before + text + suffix.after))
        return tokens

    def _words(self, fields: Sequence[str]) -> str:
        return " ".join(f"_{token}" for field, token in self._tokens() if field in fields)
