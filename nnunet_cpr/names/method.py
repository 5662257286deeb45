"""Settings encoded in a name: an optimizer, its regularization and their values."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nnunet_cpr._spelling import WrongName
from nnunet_cpr._validation import positive_number, short_repr
from nnunet_cpr.baselines.registry import BASELINES, BaselineArgs
from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.names.suffixes import REGULARIZER_WORDS, BaselineChoice, Suffix, WarmStartShare

if TYPE_CHECKING:
    from nnunet_cpr.baselines import Baseline
    from nnunet_cpr.param_groups import Params


def default_bound(warmup: int) -> KappaWS:
    """Return the bound of a name without one, for a learning-rate warm-up of this many steps.

    It is set 1,000 steps after the warm-up, but not after more than twice the warm-up, which agrees with
    the paper's tables for segmentation and for vision.

    Example:
        >>> default_bound(2000), default_bound(500), default_bound(0)
        (KappaWS(steps=3000), KappaWS(steps=1000), KappaWS(steps=1000))
    """
    return KappaWS(warmup + min(1000, warmup) if warmup else 1000)


@dataclass(frozen=True)
class Family:
    """First part of a name, with its default settings.

    Attributes:
        name: the first part itself.
        title: the family in a few words.
        optimizer: ``sgd``, ``adam``, ``muon``, ``amos``, or ``other`` for that of another trainer.
        cpr: True if it trains with CPR.
        warmup: steps of learning-rate warm-up.
        lr: highest learning rate.
    """

    name: str
    optimizer: str
    cpr: bool = False
    warmup: int = 0
    lr: float = 1e-2
    title: str = ""


@dataclass(frozen=True)
class MethodName(ABC):
    """Settings of an optimizer and its regularization; None stands for the default of the family.

    ``str()`` returns the name, with the suffixes in the order of :attr:`suffixes`.

    Attributes:
        families: families of this kind of name.
        suffixes: suffixes of this kind of name.
        prefix: common prefix of the families.
        family: key of ``families``.
        kappa, regularizer, mu, adaptive: arguments of CPR; ``kappa`` may be a share of the training.
        baseline: comparison method.
        lr: highest learning rate.
        momentum: coefficient of the momentum of SGD or Muon.
        weight_decay: weight decay of the optimizer or the comparison method.
        warmup: steps of learning-rate warm-up.
        seed: seed of the random number generators.

    Raises:
        WrongName: a value is out of range, or settings contradict each other.
    """

    families: ClassVar[dict[str, Family]]
    suffixes: ClassVar[tuple[Suffix, ...]]
    prefix: ClassVar[str] = ""

    family: str
    kappa: Bound | WarmStartShare | None = None
    regularizer: str | None = None
    mu: float | None = None
    adaptive: bool = False
    baseline: BaselineChoice | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    warmup: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.family not in self.families:
            raise WrongName(f"unknown family {self.family!r}; choose from {', '.join(self.families)}")
        self._check_values()
        self._check_combination()
        if self.warmup_steps >= self.total_steps:
            raise WrongName(
                f"the learning-rate warm-up of {self.warmup_steps} steps is not shorter than the "
                f"training of {self.total_steps} steps; choose a shorter one with _warmup<N>"
            )

    def _check_values(self) -> None:
        """Check that a name can express the settings."""
        if self.regularizer not in (None, *REGULARIZER_WORDS):
            known = ", ".join(REGULARIZER_WORDS)
            raise WrongName(f"unknown regularizer {short_repr(self.regularizer)}; choose from {known}")
        numbers = {name: getattr(self, name) for name in ("mu", "lr", "momentum", "weight_decay")}
        if self.baseline is not None:
            entry, value = BASELINES.get(self.baseline.keyword), self.baseline.value
            if entry is None or (entry.setting is None) != (value is None):
                raise WrongName(f"{self.baseline!r} cannot be written in a name")
            if entry.is_count and value is not None and not (value % 1 == 0 and value < 10**9):
                raise WrongName(f"{self.baseline!r} cannot be written in a name")
            numbers[entry.keyword] = value
        for name, value in numbers.items():
            if value is not None:
                try:
                    positive_number(name, value, allow_zero=name == "weight_decay")
                except ValueError as error:
                    raise WrongName(str(error)) from None
        if self.momentum is not None and self.momentum >= 1:
            raise WrongName(f"momentum: expected a number below 1, got {self.momentum:g}")
        for suffix in self.suffixes:
            value = getattr(self, suffix.field)
            if suffix.minimum is None or value is None:
                continue
            if not suffix.minimum <= value < 10**9:
                expected = f"a whole number, {suffix.minimum} or above"
                raise WrongName(f"{suffix.field}: expected {expected}, got {value!r}")

    def _check_combination(self) -> None:
        given = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name)]
        of_cpr = [name for name in ("kappa", "regularizer", "mu", "adaptive") if name in given]
        if of_cpr and not self.defaults.cpr:
            with_cpr = [
                f.name
                for f in self.families.values()
                if f.cpr and f.optimizer == self.defaults.optimizer
            ]
            advice = f"use {with_cpr[0]} or " if with_cpr else ""
            raise WrongName(
                f"{self.family} trains without CPR and takes no {self._written(of_cpr)}; "
                f"{advice}leave it out"
            )
        others = [field for field in ("weight_decay", "baseline") if getattr(self, field) is not None]
        if others and self.defaults.cpr:
            raise WrongName(
                f"{self.family} uses CPR in place of weight decay and takes no "
                f"{self._written(others)}; leave it out"
            )
        if self.momentum is not None and self.defaults.optimizer not in ("sgd", "muon"):
            raise WrongName(
                f"{self.family} takes no {self._written(['momentum'])}, which is for SGD and Muon; "
                "leave it out"
            )
        if self.baseline is None:
            return
        if self.defaults.optimizer == "amos":
            raise WrongName(
                f"{self.family} has a decay of its own and takes no {self._written(['baseline'])}; "
                "leave it out"
            )
        if self.weight_decay is not None and not BASELINES[self.baseline.keyword].decays:
            raise WrongName(
                f"{self._written(['baseline'])} replaces weight decay; leave out "
                f"{self._written(['weight_decay'])}"
            )

    def __str__(self) -> str:
        return "_".join([self.family, *(token for _, token in self._tokens())])

    @classmethod
    def split(cls, name: str) -> tuple[str, str, str]:
        """Return the part with the settings, ``_on_`` and the other trainer, or "" twice."""
        return name, "", ""

    @property
    def defaults(self) -> Family:
        """Family with its default settings."""
        return self.families[self.family]

    @property
    def decays(self) -> bool:
        """True if the method has a weight decay."""
        return not self.defaults.cpr and (
            self.baseline is None or BASELINES[self.baseline.keyword].decays
        )

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Number of optimizer steps of the training."""

    @property
    def warmup_steps(self) -> int:
        """Steps of linear learning-rate warm-up."""
        return self.defaults.warmup if self.warmup is None else self.warmup

    @property
    def bound(self) -> Bound:
        """Bound of CPR."""
        return self.bound_for(self.total_steps)

    def bound_for(self, total_steps: int) -> Bound:
        """Return the bound of CPR for a training of this length, which may differ from the name's."""
        if isinstance(self.kappa, WarmStartShare):
            return self.kappa.resolve(total_steps)
        return self.kappa or default_bound(self.warmup_steps)

    @property
    def cpr_settings(self) -> dict[str, Any]:
        """Keyword arguments of :class:`SGDCPR`, :class:`AdamCPR` and :class:`MuonCPR`."""
        return {
            "kappa": self.bound,
            "regularizer": self.regularizer or "l2",
            "mu": self.mu or 1.0,
            "adaptive": self.adaptive,
        }

    def build_baseline(
        self, params: Params, weight_decay: float, total_steps: int | None = None
    ) -> Baseline | None:
        """Return the comparison method, not attached yet, or None if the name has none.

        Args:
            params: the parameters to regularize.
            weight_decay: weight decay of the method.
            total_steps: number of optimizer steps of the training; None for that of the name.
        """
        if self.baseline is None:
            return None
        training = BaselineArgs(params, weight_decay, total_steps or self.total_steps)
        return BASELINES[self.baseline.keyword].build(training, self.baseline.value or 0.0)

    def _tokens(self) -> list[tuple[str, str]]:
        """Return the field and the suffix, without underscore, of each given setting."""
        tokens = []
        for suffix in self.suffixes:
            value = getattr(self, suffix.field)
            text = None if value is None or value is False else suffix.format(value)
            if text is not None:
                tokens.append((suffix.field, suffix.before + text + suffix.after))
        return tokens

    def _written(self, fields: Sequence[str]) -> str:
        return " ".join(f"_{token}" for field, token in self._tokens() if field in fields)
