"""Names of nnU-Net trainers: ``nnUNetTrainerCPR_ws2000_100epochs_on_nnUNetTrainerDA5``.

A name is a family, its suffixes, and last ``_on_`` and the class name of a base trainer, another trainer
of nnU-Net. The training keeps everything of the base trainer except the optimizer or its regularization.

nnU-Net's command has no option for the settings of a trainer, names result folders after the trainer and
searches for it by name at inference. The name therefore holds the settings. This module does not import
nnU-Net.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from nnunet_cpr.baselines.registry import BASELINES
from nnunet_cpr.cpr.bounds import Bound
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names.families import FAMILIES, Family
from nnunet_cpr.names.suffixes import (
    SUFFIXES,
    BaselineChoice,
    Cooldown,
    Suffix,
    WarmStartShare,
    find_suffix,
)
from nnunet_cpr.names.suggestions import nearest_family, suggest_suffix
from nnunet_cpr.names.training import Training, resolve
from nnunet_cpr.spelling import OTHER_TRAINER, WrongName, with_suffix

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
        follows = isinstance(self.kappa, WarmStartShare) or (
            self.baseline is not None and BASELINES[self.baseline.keyword].needs_length
        )
        is_endless = self.schedule == "anytime" and follows
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
        if self.on is None:  # otherwise with the length of the base trainer
            _ = self.training  # checks the warm-up

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
    def decays(self) -> bool:
        """True if the method has a weight decay."""
        has_own = self.baseline is None or BASELINES[self.baseline.keyword].decays
        return has_own and not self.defaults.cpr

    @property
    def training(self) -> Training:
        """All that the name trains, where no base trainer has another length than ``nnUNetTrainer``."""
        return resolve(self)


Name = TypeVar("Name", bound=TrainerName)


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


def parse_name(kind: type[Name], name: str) -> Name | None:
    """Parse a name of one kind, as :func:`parse_trainer_name` does."""
    if not name.lower().startswith(kind.prefix.lower()):
        return None
    own, ending, other = kind.split(name)
    family, *tokens = own.split("_")
    if family not in kind.families:
        nearest = nearest_family(kind.families, kind.prefix, family)
        if nearest is None:
            return None
        raise WrongName(
            f"unknown name {family!r}",
            f"did you mean {nearest}{name[len(family) :]}? Every suffix starts with an underscore",
        )
    timm = None
    if kind.families[family].optimizer == "timm":
        if not tokens or find_suffix(kind.suffixes, tokens[0]):
            raise WrongName(f"{name!r} names no optimizer of timm", f"write it first, as {family}_lion")
        timm = tokens.pop(0)
    if ending:
        tokens.append(BASE_TRAINER.before + other)
    settings = parse_suffixes(kind, tokens, name)
    try:
        return kind(family, timm, **settings)
    except WrongName as error:
        raise WrongName(f"{name!r}: {error}") from None


def parse_suffixes(kind: type[TrainerName], tokens: Sequence[str], name: str) -> dict[str, Any]:
    """Return the settings that suffixes of a name give, by field.

    Args:
        kind: :class:`TrainerName` or a subclass, which defines the suffixes.
        tokens: the suffixes, without their underscores.
        name: the whole name, for messages.

    Raises:
        WrongName: a suffix is unknown, or two of them give the same setting.

    Example:
        >>> parse_suffixes(TrainerName, ["lr1en3", "seed1"], "Mine_lr1en3_seed1")
        {'lr': 0.001, 'seed': 1}
    """
    settings: dict[str, Any] = {}
    given: dict[str, str] = {}
    for token in tokens:
        suffix = find_suffix(kind.suffixes, token)
        if suffix is None:
            advice = suggest_suffix(kind.suffixes, kind.prefix, token, name)
            raise WrongName(f"unknown suffix _{token} in {name!r}", f"{advice}")
        first = given.setdefault(suffix.field, token)
        if suffix.field in settings:
            raise WrongName(
                f"_{first} and _{token} in {name!r} contradict each other", "keep one of them"
            )
        try:
            settings[suffix.field] = suffix.parse(token)
        except ValueError as error:
            raise WrongName(f"_{token} in {name!r}: {error}") from None
    return settings


def split_suffixes(kind: type[TrainerName], name: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to split a name into a class name and one or more suffixes, fewest suffixes first.

    Example:
        >>> list(split_suffixes(TrainerName, "Mine_lr1en3_seed1"))
        [('Mine_lr1en3', 'seed1'), ('Mine', 'lr1en3_seed1')]
    """
    tokens = name.split("_")
    for end in range(len(tokens) - 1, 0, -1):
        if find_suffix(kind.suffixes, tokens[end]) is None:
            return
        yield "_".join(tokens[:end]), "_".join(tokens[end:])


def with_pretrained(name: str, weights: str) -> str:
    """Return the name of a trainer with ``_pre<Word>``, so that its runs have a folder of their own.

    Args:
        name: the trainer, perhaps with ``_pre<Word>`` already.
        weights: text that identifies the pretrained weights, whose hash is the word.

    Example:
        >>> with_pretrained("nnUNetTrainerCPR", "Dataset003_Liver/checkpoint_final.pth")
        'nnUNetTrainerCPR_prec82e9328'
        >>> with_pretrained("nnUNetTrainerCPR_preLiver", "Dataset003_Liver/checkpoint_final.pth")
        'nnUNetTrainerCPR_preLiver'
    """
    found = [find_suffix(TrainerName.suffixes, token) for token in TrainerName.split(name)[0].split("_")]
    if any(suffix is not None and suffix.field == "pretrained" for suffix in found):
        return name
    return with_suffix(name, f"_pre{hashlib.sha256(weights.encode()).hexdigest()[:8]}")


def suffix_table() -> list[tuple[str, str, str]]:
    """Return a row for each suffix: its syntax, the families that take it, and its meaning.

    Example:
        >>> suffix_table()[0]
        ('_k<V>', 'with CPR', 'bound: the same value for every parameter matrix')
    """
    rows = [(suffix.syntax, _describe_families(suffix), suffix.meaning) for suffix in SUFFIXES]
    return [*rows, (f"{OTHER_TRAINER}<Trainer>", "all", "like another trainer; the last suffix")]


def _describe_families(suffix: Suffix) -> str:
    taken = [name for name in FAMILIES if _takes(name, suffix)]
    refused = [name for name in FAMILIES if name not in taken]
    with_cpr = [family.name for family in FAMILIES.values() if family.cpr]
    if not refused:
        return "all"
    if taken == with_cpr:
        return "with CPR"
    if refused == with_cpr:
        return "without CPR"
    if set(refused) == {*with_cpr, "nnUNetTrainerAMOS"}:
        return "without CPR (not AMOS)"
    short = [name.removeprefix("nnUNetTrainer") for name in (refused if len(refused) <= 2 else taken)]
    return "all but " + " and ".join(short) if len(refused) <= 2 else ", ".join(short)


def _takes(family: str, suffix: Suffix) -> bool:
    value = {"<N>": "10", "<V>": "0p5", "<Word>": "Liver"}.get(suffix.placeholder, "")
    sample = suffix.before + value + suffix.after
    try:
        TrainerName(family, **{suffix.field: suffix.parse(sample)})
    except WrongName:
        return False
    return True
