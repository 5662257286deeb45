"""All that a name trains, with every default spelled out.

:func:`resolve` is the only function with defaults that depend on something: the length of the training,
the base trainer, other settings of the name. Its result, a :class:`Training`, is compared where two
trainings should be one, and :data:`ROWS` print it for ``trainers NAME``, the log and the model card.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnunet_cpr.baselines.registry import BASELINES
from nnunet_cpr.cpr.bounds import Bound, KappaWS
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.suffixes import (
    DEFAULT_AVERAGING_DECAY,
    BaselineChoice,
    Cooldown,
    WarmStartShare,
)
from nnunet_cpr.refusals import counted
from nnunet_cpr.spelling import WrongName

if TYPE_CHECKING:
    from nnunet_cpr.baselines import Baseline
    from nnunet_cpr.cpr.regularized_parameters import Params
    from nnunet_cpr.names.trainer_name import TrainerName


@dataclass(frozen=True)
class BaseValues:
    """Values of the trainer that a name builds on; by default those of ``nnUNetTrainer``.

    Attributes:
        epochs, iterations: number of epochs, and of optimizer steps in each.
        lr: highest learning rate; None for that of the family.
        weight_decay: weight decay.
        warmup: steps of learning-rate warm-up of a trainer whose optimizer is kept.
    """

    epochs: int = 1000
    iterations: int = 250
    lr: float | None = None
    weight_decay: float = 3e-5
    warmup: int = 0


@dataclass(frozen=True)
class Training:
    """All that a name trains; None where a setting does not apply or is the base trainer's own.

    Attributes:
        family, timm, on: as in :class:`~nnunet_cpr.names.trainer_name.TrainerName`.
        lr: highest learning rate.
        momentum: coefficient of the momentum.
        warmup: steps of learning-rate warm-up.
        schedule: ``poly``, ``constant`` or a :class:`~nnunet_cpr.names.suffixes.Cooldown`, after the
            warm-up.
        horizon: epochs over which the learning rate falls.
        ema: decay of the averaged weights.
        freeze: part of the network that is not trained.
        pretrained: name of the pretrained weights.
        seed: seed of the random number generators.
        epochs, iterations: number of epochs, and of optimizer steps in each.
        weight_decay: weight decay of what is not regularized in another way.
        baseline: comparison method.
        baseline_steps: steps over which the comparison method changes.
        kappa, regularizer, mu, adaptive: arguments of CPR.
    """

    family: str
    timm: str | None
    on: str | None
    lr: float | None
    momentum: float | None
    warmup: int
    schedule: str | Cooldown | None
    horizon: int | None
    ema: float | None
    freeze: str | None
    pretrained: str | None
    seed: int | None
    epochs: int
    iterations: int
    weight_decay: float | None
    baseline: BaselineChoice | None
    baseline_steps: int | None
    kappa: Bound | None
    regularizer: str | None
    mu: float | None
    adaptive: bool

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.epochs * self.iterations

    @property
    def is_never_bounded(self) -> bool:
        """True if no bound is set before the end, so that CPR regularizes nothing."""
        return self.kappa is not None and self.kappa.earliest >= self.steps

    @property
    def cpr_settings(self) -> dict[str, Any]:
        """Keyword arguments of :class:`~nnunet_cpr.CPR` and of the optimizers with CPR."""
        names = ("kappa", "regularizer", "mu", "adaptive")
        return {name: getattr(self, name) for name in names}

    def build_baseline(self, params: Params) -> Baseline | None:
        """Return the comparison method, not attached yet, or None if the name has none.

        Args:
            params: the parameters to regularize.
        """
        if self.baseline is None:
            return None
        method, value = BASELINES[self.baseline.keyword], self.baseline.value
        return method.build(params, self.weight_decay or 0.0, self.baseline_steps, value)

    def plain(self) -> dict[str, Any]:
        """Return the fields as values of JSON, bounds and the like by their text."""
        plain = (str, int, float, type(None))
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value if isinstance(value, plain) else str(value) for name, value in values}

    def differences(self, other: Training) -> list[str]:
        """Return the names of the fields in which two trainings differ.

        Example:
            >>> from nnunet_cpr.names.trainer_name import TrainerName
            >>> short, long = (TrainerName("nnUNetTrainerCPR", epochs=n).training for n in (10, 200))
            >>> long.differences(short)
            ['horizon', 'epochs', 'kappa']
        """
        names = (field.name for field in dataclasses.fields(self))
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def rows(self) -> list[tuple[str, str]]:
        """Return titles and texts of all that applies, for users to read."""
        rows = ((row.title, row.text(self)) for row in ROWS)
        return [(title, text) for title, text in rows if text]


def resolve(
    name: TrainerName, base: BaseValues = BaseValues(), followed: float | None = None
) -> Training:
    """Return all that a name trains.

    Args:
        name: settings of the name.
        base: values of the trainer that the name builds on.
        followed: number of steps that the default warm-up and bound, and shares, follow; None for those
            of the training. A training that version 0.3.0 has extended keeps those with which it began;
            the defaults of version 0.2.0 follow none, infinity.

    Raises:
        WrongName: the learning-rate warm-up does not end before the training, or before its cooldown.

    Example:
        >>> from nnunet_cpr.names.trainer_name import TrainerName
        >>> training = resolve(TrainerName("nnUNetTrainerAdamCPR"), BaseValues(epochs=20))
        >>> training.warmup, training.kappa, training.horizon
        (500, KappaWS(steps=1000), 20)
    """
    family = name.defaults
    epochs, iterations = name.epochs or base.epochs, name.iterations or base.iterations
    steps = epochs * iterations
    if name.schedule == "anytime" or not name.defaults_follow_length:
        followed = math.inf
    elif followed is None:
        followed = steps

    lr, momentum, warmup = name.lr, name.momentum, name.warmup
    schedule = {None: "poly", "anytime": "constant"}.get(name.schedule, name.schedule)  # type: ignore
    if family.keeps_optimizer:
        warmup = base.warmup
        schedule = schedule if name.schedule else None
    else:
        lr = lr or base.lr or default_lr(name)
        momentum = family.momentum if momentum is None else momentum
        warmup = int(min(family.warmup, followed / 10)) if warmup is None else warmup
        _check_warmup(warmup, steps, schedule)

    method = None if name.baseline is None else BASELINES[name.baseline.keyword]
    if family.cpr:  # of biases and normalization weights
        weight_decay = None if family.keeps_optimizer else 0.0
    elif not name.decays:
        weight_decay = None
    elif name.weight_decay is not None:
        weight_decay = name.weight_decay
    elif family.keeps_optimizer and method is None:
        weight_decay = None  # the optimizer's own
    else:
        weight_decay = 0.0 if family.optimizer == "amos" else base.weight_decay

    kappa = name.kappa or default_bound(warmup, followed)
    if isinstance(kappa, WarmStartShare):
        kappa = kappa.resolve(steps if math.isinf(followed) else int(followed))
    return Training(
        family=name.family,
        timm=name.timm,
        on=name.on,
        lr=lr,
        momentum=momentum,
        warmup=warmup,
        schedule=schedule,
        horizon=None if schedule == "constant" else epochs,
        ema=name.ema or (DEFAULT_AVERAGING_DECAY if name.schedule == "anytime" else None),
        freeze=name.freeze,
        pretrained=name.pretrained,
        seed=name.seed,
        epochs=epochs,
        iterations=iterations,
        weight_decay=weight_decay,
        baseline=name.baseline,
        baseline_steps=steps if method is not None and method.needs_length else None,
        kappa=kappa if family.cpr else None,
        regularizer=(name.regularizer or "l2") if family.cpr else None,
        mu=(name.mu or 1.0) if family.cpr else None,
        adaptive=name.adaptive,
    )


def differences_from_longer(name: TrainerName, training: Training) -> list[str]:
    """Return the fields that a longer training of a name has other than this one, without its epochs.

    Example:
        >>> from nnunet_cpr.names.trainer_name import TrainerName
        >>> name = TrainerName("nnUNetTrainerCPR", schedule="constant", epochs=20)
        >>> differences_from_longer(name, name.training)
        ['kappa']
    """
    base = BaseValues(
        1000 * training.epochs,
        training.iterations,
        training.lr,
        training.weight_decay or 0.0,
        training.warmup,
    )
    longer = resolve(dataclasses.replace(name, epochs=None), base)
    return [field for field in longer.differences(training) if field != "epochs"]


def default_lr(name: TrainerName) -> float:
    """Return the highest learning rate of a name without one."""
    return name.defaults.lr if name.timm is None else from_timm.default_lr(name.timm)


def default_bound(warmup: int, steps: float) -> KappaWS:
    """Return the bound of a name without one.

    It is set 1,000 steps after the learning-rate warm-up, but no later than after twice the warm-up,
    which agrees with the paper's tables for segmentation and for vision; without a warm-up after 1,000
    steps, but no later than after 4 % of the training.

    Args:
        warmup: steps of learning-rate warm-up.
        steps: length of the training; infinity for a bound that does not depend on it.

    Example:
        >>> default_bound(2000, 250_000), default_bound(500, 5000)
        (KappaWS(steps=3000), KappaWS(steps=1000))
        >>> default_bound(0, 250_000), default_bound(0, 2500), default_bound(0, math.inf)
        (KappaWS(steps=1000), KappaWS(steps=100), KappaWS(steps=1000))
    """
    if warmup:
        return KappaWS(warmup + min(1000, warmup))
    return KappaWS(max(1, round(min(1000, 0.04 * steps))))


def _check_warmup(warmup: int, steps: int, schedule: Any) -> None:
    cooldown = schedule.percent if isinstance(schedule, Cooldown) else 0
    if warmup >= steps * (1 - cooldown / 100):
        before = f" before its cooldown of {cooldown:g} %" if cooldown else ""
        raise WrongName(
            f"the learning-rate warm-up of {warmup} steps is not shorter than the training of "
            f"{steps} steps{before}",
            "choose a shorter one with _warmup<N>",
        )


NEVER = "which never comes"
"""Words in the description of a bound that is not set before the end of the training."""


@dataclass(frozen=True)
class Row:
    """Line of ``trainers NAME``, the log and the model card.

    Attributes:
        title: the subject.
        fields: the fields of :class:`Training` that it describes.
        text: function that describes them, with an empty text where they do not apply.
    """

    title: str
    fields: tuple[str, ...]
    text: Callable[[Training], str]


def titles(fields: Iterable[str]) -> list[str]:
    """Return the titles of the rows that describe fields of a training.

    Example:
        >>> titles(["kappa", "warmup", "horizon"])
        ['learning rate', 'bound']
    """
    chosen = {*fields}
    return [row.title for row in ROWS if chosen & {*row.fields}]


def describe_average(decay: float) -> str:
    """Return an average of weights in words."""
    return (
        f"exponential moving average with decay {decay:g}, over about {1 / (1 - decay):,.0f} steps, "
        "but at most a tenth of the steps so far"
    )


def _describe_family(training: Training) -> str:
    momentum = "" if training.momentum is None else f", momentum {training.momentum:g}"
    return f"{training.family}: {FAMILIES[training.family].title}{momentum}"


def _describe_base(training: Training) -> str:
    kept = FAMILIES[training.family].keeps_optimizer
    kept_parts = "optimizer and schedule too" if kept else "except the optimizer"
    return f"{training.on}, {kept_parts}" if training.on else ""


def _describe_learning_rate(training: Training) -> str:
    highest = "" if training.lr is None else f"at most {training.lr:g}, "
    warmup = f"linear warm-up over {counted(training.warmup, 'step')}, then " if training.warmup else ""
    if isinstance(training.schedule, Cooldown):
        shape = f"constant, linear to 0 in the last {training.schedule.percent:g} %"
    elif training.schedule == "poly":
        shape = f"polynomial to 0 over {counted(training.horizon or 0, 'epoch')}"
    else:
        shape = training.schedule or "the base trainer's schedule"
    return highest + warmup + shape


def _describe_weight_decay(training: Training) -> str:
    decay = "that of the base trainer" if (value := training.weight_decay) is None else f"{value:g}"
    if FAMILIES[training.family].cpr:
        return f"none for regularized parameters, {decay} for biases and normalization weights"
    if training.baseline is None:
        return f"{decay} for all parameters"
    method = BASELINES[training.baseline.keyword]
    return (
        f"{decay}, applied by {method.method}" if method.decays else f"none, replaced by {method.method}"
    )


def _describe_bound(training: Training) -> str:
    bound, steps = training.kappa, training.steps
    if bound is None:
        return ""
    when = "set at step" if bound.is_set_once else "not before step"
    part = f"after {bound.earliest / steps:.1%} of the training"
    if training.is_never_bounded:
        part = f"{NEVER}, as the training has {counted(steps, 'step')}; choose a smaller _ws<N>"
    return f"_{bound}: {bound.title}; {when} {bound.earliest:,}, {part}"


ROWS = (
    Row("family", ("family", "timm", "momentum"), _describe_family),
    Row("like", ("on",), _describe_base),
    Row("learning rate", ("lr", "warmup", "schedule", "horizon"), _describe_learning_rate),
    Row(
        "averaged weights",
        ("ema",),
        lambda t: f"validated and saved: {describe_average(t.ema)}" if t.ema else "",
    ),
    Row("frozen", ("freeze",), lambda t: f"the {t.freeze} keeps its weights" if t.freeze else ""),
    Row(
        "begins with",
        ("pretrained",),
        lambda t: (
            f"weights called {t.pretrained}, by -pretrained_weights CHECKPOINT" if t.pretrained else ""
        ),
    ),
    Row("seed", ("seed",), lambda t: "" if t.seed is None else f"{t.seed}"),
    Row(
        "length",
        ("epochs", "iterations"),
        lambda t: (
            f"{counted(t.epochs, 'epoch')} of {counted(t.iterations, 'iteration')}, "
            + counted(t.steps, "step")
        ),
    ),
    Row("weight decay", ("weight_decay", "baseline", "baseline_steps"), _describe_weight_decay),
    Row(
        "regularized",
        ("regularizer", "mu", "adaptive"),
        lambda t: (
            f"{t.regularizer} of each weight matrix with CPR, mu = {t.mu:g}"
            + (", adaptive bounds" if t.adaptive else "")
            if t.regularizer
            else ""
        ),
    ),
    Row("bound", ("kappa",), _describe_bound),
)
"""Each field is in one row."""
