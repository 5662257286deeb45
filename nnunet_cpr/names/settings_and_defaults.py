"""Settings that a name holds: a family, and values that a name can express."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from nnunet_cpr.baselines.registry import BASELINES
from nnunet_cpr.cpr.bounds import Bound, KappaWS
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names.suffixes import (
    DEFAULT_AVERAGING_DECAY,
    SUFFIXES,
    BaselineChoice,
    Cooldown,
    Suffix,
    WarmStartShare,
)
from nnunet_cpr.spelling import OTHER_TRAINER, WrongName

if TYPE_CHECKING:
    from nnunet_cpr.baselines import Baseline
    from nnunet_cpr.cpr.regularized_parameters import Params


DEFAULT_EPOCHS = 1000
DEFAULT_ITERATIONS = 250
DEFAULT_LR = 1e-2
DEFAULT_WEIGHT_DECAY = 3e-5
MUON_LR = 3e-3


@dataclass(frozen=True)
class Family:
    """First part of a name, with its default settings.

    Attributes:
        name: the first part itself.
        optimizer: ``sgd``, ``adam``, ``muon``, ``amos``, or ``other`` for that of the base trainer.
        title: the family in a few words.
        cpr: True if it trains with CPR.
        warmup: steps of learning-rate warm-up.
        lr: highest learning rate.
    """

    name: str
    optimizer: str
    title: str = ""
    cpr: bool = False
    warmup: int = 0
    lr: float = 1e-2


FAMILIES = {
    family.name: family
    for family in (
        Family("nnUNetTrainerCPR", "sgd", "nnU-Net's SGD with CPR", cpr=True),
        Family("nnUNetTrainerAdamCPR", "adam", "Adam with CPR", cpr=True, warmup=2000),
        Family("nnUNetTrainerMuonCPR", "muon", "Muon with CPR", cpr=True, warmup=2000, lr=MUON_LR),
        Family("nnUNetTrainerSGD", "sgd", "nnU-Net's SGD with weight decay"),
        Family("nnUNetTrainerAdamW", "adam", "Adam with decoupled weight decay", warmup=2000),
        Family("nnUNetTrainerMuon", "muon", "Muon with decoupled weight decay", warmup=2000, lr=MUON_LR),
        Family("nnUNetTrainerAMOS", "amos", "AMOS, with its own decay", warmup=2000, lr=1e-3),
        Family("nnUNetTrainerTimm", "timm", "an optimizer of timm, such as _lion", warmup=2000),
        Family("nnUNetTrainerTimmCPR", "timm", "an optimizer of timm with CPR", cpr=True, warmup=2000),
        Family("nnUNetTrainerAttachCPR", "other", "the other trainer's optimizer with CPR", cpr=True),
        Family("nnUNetTrainerPlain", "other", "the other trainer, unchanged, with suffixes"),
    )
}


_WITHOUT_MOMENTUM = ("adam", "amos", "other")


def _base_trainer(name: str) -> str:
    # nnU-Net's folder names cannot contain leading or double underscores of a class name.
    is_valid = name.isidentifier() and "__" not in f"_{name}" and OTHER_TRAINER not in name
    if not is_valid or name.partition("_")[0] in FAMILIES:
        raise WrongName(
            f"expected the class name of a trainer after {OTHER_TRAINER}, not of nnunet-cpr and "
            f"without leading or double underscores, got {name!r}",
            f"write all settings before {OTHER_TRAINER}",
        )
    return name


BASE_TRAINER = Suffix("on", "base trainer", OTHER_TRAINER[1:], "<Trainer>", build=_base_trainer)


def default_bound(warmup: int, total_steps: int | None) -> KappaWS:
    """Return the bound of a name without one.

    It is set 1,000 steps after the learning-rate warm-up, but no later than after twice the warm-up,
    which agrees with the paper's tables for segmentation and for vision; without a warm-up after 1,000
    steps, but no later than after 4 % of the training.

    Args:
        warmup: steps of learning-rate warm-up.
        total_steps: length of the training; None for a bound that does not depend on it.

    Example:
        >>> default_bound(2000, 250_000), default_bound(500, 5000)
        (KappaWS(steps=3000), KappaWS(steps=1000))
        >>> default_bound(0, 250_000), default_bound(0, 2500), default_bound(0, None)
        (KappaWS(steps=1000), KappaWS(steps=100), KappaWS(steps=1000))
    """
    if warmup:
        return KappaWS(warmup + min(1000, warmup))
    share = 1000 if total_steps is None else round(0.04 * total_steps)
    return KappaWS(max(1, min(1000, share)))


@dataclass(frozen=True)
class TrainerName:
    """Settings of a trainer; None stands for the default of the family.

    ``str()`` returns the name, with the suffixes in the order of :data:`SUFFIXES`.

    Attributes:
        family: key of :data:`FAMILIES`.
        timm: name of the optimizer of a ``Timm`` family, which is the first suffix.
        kappa, regularizer, mu, adaptive: arguments of CPR; ``kappa`` may be a share of the training.
        baseline: comparison method.
        lr: highest learning rate.
        momentum: coefficient of the momentum of SGD or Muon.
        weight_decay: weight decay of the optimizer or the comparison method.
        warmup: steps of learning-rate warm-up.
        seed: seed of the random number generators.
        schedule: ``constant``, ``anytime`` (with averaged weights, independent of the length), or a
            :class:`~nnunet_cpr.names.suffixes.Cooldown`.
        ema: decay of the exponential moving average of the weights.
        freeze: part of the network that is not trained.
        pretrained: name of the pretrained weights that the training begins with.
        epochs: number of epochs.
        iterations: optimizer steps per epoch.
        on: class name of the base trainer, of which the training keeps everything except the optimizer
            or its regularization.

    Raises:
        WrongName: settings contradict each other, or a name cannot express one of them. No name has a
            ``Timm`` family without an optimizer, which stands for the class of the family.

    Example:
        >>> str(TrainerName("nnUNetTrainerCPR", mu=0.5, epochs=100))
        'nnUNetTrainerCPR_mu0p5_100epochs'
    """

    families: ClassVar[dict[str, Family]] = FAMILIES
    suffixes: ClassVar[tuple[Suffix, ...]] = (*SUFFIXES, BASE_TRAINER)
    prefix: ClassVar[str] = "nnUNetTrainer"
    defaults_follow_length: ClassVar[bool] = True

    family: str
    timm: str | None = None
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
    schedule: str | Cooldown | None = None
    ema: float | None = None
    freeze: str | None = None
    pretrained: str | None = None
    epochs: int | None = None
    iterations: int | None = None
    on: str | None = None

    def __post_init__(self) -> None:
        if self.family not in self.families:
            raise WrongName(
                f"family: unknown {self.family!r}", f"choose from {', '.join(self.families)}"
            )
        own, tokens = self.defaults, self.tokens()
        for field in fields(self):
            value = getattr(self, field.name)
            is_beside_suffixes = field.name in ("family", "timm")
            if not is_beside_suffixes and value != field.default and field.name not in tokens:
                raise WrongName(f"{field.name}: expected what a name can express, got {value!r}")
        if self.timm is not None:
            if own.optimizer != "timm":
                raise WrongName(f"timm: expected no optimizer for {own.name}, got {self.timm!r}")
            try:
                from_timm.check(self.timm, self.momentum is not None)
            except ValueError as error:
                raise WrongName(str(error)) from None
        with_cpr = [f.name for f in self.families.values() if f.cpr and f.optimizer == own.optimizer]
        use_cpr = f"use {with_cpr[0]} or " if with_cpr else ""
        is_endless = self.schedule == "anytime" and bool(self.length_dependent)
        use_start = "choose _ws<N> or " if own.cpr else ""
        rules = (
            (not own.cpr, ("kappa", "regularizer", "mu", "adaptive"), "trains without CPR", use_cpr),
            (own.cpr, ("baseline", "weight_decay"), "uses CPR in place of weight decay", ""),
            (own.optimizer in _WITHOUT_MOMENTUM, ("momentum",), "does not build SGD or Muon", ""),
            (own.optimizer == "amos", ("baseline",), "has a decay of its own", ""),
            (own.optimizer == "other", ("warmup",), "keeps the base trainer's learning rates", ""),
            (not self.decays, ("weight_decay",), f"has no decay beside _{tokens.get('baseline')}", ""),
            (is_endless, ("kappa", "baseline"), "has no length with _anytime", use_start),
        )
        for is_refused, names, reason, advice in rules:
            given = " ".join(f"_{tokens[name]}" for name in names if name in tokens)
            if is_refused and given:
                raise WrongName(f"{own.name} {reason} and takes no {given}", f"{advice}leave it out")
        self.check_warmup(self.warmup_steps, self.total_steps)

    def check_warmup(self, warmup: int, total_steps: int) -> None:
        """Check that the learning-rate warm-up ends before the training, or before its cooldown.

        Args:
            warmup: steps of learning-rate warm-up, if another trainer has its own.
            total_steps: number of optimizer steps, which may differ from the name's.

        Raises:
            WrongName: it does not.
        """
        cooldown = self.schedule.percent if isinstance(self.schedule, Cooldown) else 0
        if warmup >= total_steps * (1 - cooldown / 100):
            before = f" before its cooldown of {cooldown:g} %" if cooldown else ""
            raise WrongName(
                f"the learning-rate warm-up of {warmup} steps is not shorter than the training of "
                f"{total_steps} steps{before}",
                "choose a shorter one with _warmup<N>",
            )

    def __str__(self) -> str:
        family = [self.family] if self.timm is None else [self.family, self.timm]
        return "_".join([*family, *self.tokens().values()])

    def tokens(self) -> dict[str, str]:
        """Return the suffix, without underscore, of each given setting, by field."""
        tokens = ((s.field, s.format(getattr(self, s.field))) for s in self.suffixes)
        return {field: token for field, token in tokens if token is not None}

    @staticmethod
    def split(name: str) -> tuple[str, str, str]:
        """Return the part with the settings, ``_on_`` and the base trainer, or "" twice."""
        return name.partition(OTHER_TRAINER)

    @property
    def defaults(self) -> Family:
        """Family with its default settings."""
        return self.families[self.family]

    @property
    def default_lr(self) -> float:
        """Highest learning rate without a suffix."""
        return self.defaults.lr if self.timm is None else from_timm.default_lr(self.timm)

    @property
    def keeps_optimizer(self) -> bool:
        """True if the training uses the optimizer of the base trainer."""
        return self.defaults.optimizer == "other"

    @property
    def decays(self) -> bool:
        """True if the method has a weight decay."""
        has_own = self.baseline is None or BASELINES[self.baseline.keyword].decays
        return has_own and not self.defaults.cpr

    @property
    def averaging_decay(self) -> float | None:
        """Decay of the averaged weights, None without them."""
        return self.ema or (DEFAULT_AVERAGING_DECAY if self.schedule == "anytime" else None)

    @property
    def length_dependent(self) -> list[str]:
        """Parts of the training that follow its length, such as the learning rate."""
        return self.differences_from_longer(self.total_steps)

    def differences_from_longer(self, total_steps: int | None) -> list[str]:
        """Return the parts that a longer training of this name has other than one of a length.

        Args:
            total_steps: as of :meth:`bound_for`.

        Example:
            >>> TrainerName("nnUNetTrainerCPR", schedule="constant").differences_from_longer(5000)
            ['bound']
        """
        is_short = self.warmup_for(total_steps) != self.warmup_for(None)
        is_share = isinstance(self.kappa, WarmStartShare)
        is_early = self.kappa is None and self.bound_for(total_steps) != self.bound_for(None)
        depends = {
            "learning rate": self.schedule not in ("constant", "anytime") or is_short,
            "bound": is_share or (self.defaults.cpr and is_early),
            "weight decay": self.baseline is not None and self.baseline.needs_length,
        }
        return [part for part, value in depends.items() if value]

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the training."""
        return (self.epochs or DEFAULT_EPOCHS) * (self.iterations or DEFAULT_ITERATIONS)

    @property
    def warmup_steps(self) -> int:
        """Steps of linear learning-rate warm-up."""
        return self.warmup_for(self.total_steps)

    def warmup_for(self, total_steps: int | None) -> int:
        """Return the steps of learning-rate warm-up for a training of this length.

        The default is at most a tenth of the training.

        Args:
            total_steps: as of :meth:`bound_for`.
        """
        if self.warmup is not None:
            return self.warmup
        longest, length = self.defaults.warmup, self._length_for_defaults(total_steps)
        return longest if length is None else min(longest, length // 10)

    @property
    def bound(self) -> Bound:
        """Bound of CPR."""
        return self.bound_for(self.total_steps)

    def bound_for(self, total_steps: int | None, warmup: int | None = None) -> Bound:
        """Return the bound of CPR for a training of this length.

        Args:
            total_steps: number of optimizer steps, which may differ from the name's; None for defaults
                that do not depend on it, as those of version 0.2.0.
            warmup: steps of learning-rate warm-up, if another trainer has its own.
        """
        if isinstance(self.kappa, WarmStartShare):
            return self.kappa.resolve(total_steps or self.total_steps)
        if warmup is None:
            warmup = self.warmup_for(total_steps)
        return self.kappa or default_bound(warmup, self._length_for_defaults(total_steps))

    def _length_for_defaults(self, total_steps: int | None) -> int | None:
        is_fixed = self.schedule == "anytime" or not self.defaults_follow_length
        return None if is_fixed else total_steps

    @property
    def cpr_settings(self) -> dict[str, Any]:
        """Keyword arguments of :class:`SGDCPR`, :class:`AdamCPR` and :class:`MuonCPR`."""
        regularizer, mu = self.regularizer or "l2", self.mu or 1.0
        return {"kappa": self.bound, "regularizer": regularizer, "mu": mu, "adaptive": self.adaptive}

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
        steps = total_steps or self.total_steps
        return BASELINES[self.baseline.keyword].build(params, weight_decay, steps, self.baseline.value)
