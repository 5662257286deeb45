"""Registry of the comparison methods, for names of trainers and vision runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnunet_cpr import baselines as methods

if TYPE_CHECKING:
    from nnunet_cpr.param_groups import Params


@dataclass(frozen=True)
class BaselineArgs:
    """Arguments for building a comparison method.

    Attributes:
        steps: optimizer steps of the whole training.
    """

    params: Params
    weight_decay: float
    steps: int


@dataclass(frozen=True)
class BaselineEntry:
    """Comparison method in names of trainers and vision runs: ``_<keyword>`` and its number, if any.

    Attributes:
        method: class in :mod:`nnunet_cpr.baselines`.
        title: the method in a few words.
        argument: argument of the class for the number in the name, None if there is no number.
        setting: meaning of the number.
    """

    keyword: str
    method: str
    title: str
    argument: str | None = None
    setting: str | None = None

    @property
    def decays(self) -> bool:
        """True if it has a weight decay."""
        return self.keyword not in ("rescale", "hyperball")

    @property
    def is_count(self) -> bool:
        """True if the number is a whole number."""
        return self.argument == "start"

    def build(self, args: BaselineArgs, value: float) -> methods.Baseline:
        """Build the method with the number in the name."""
        settings: dict[str, Any] = {"weight_decay": args.weight_decay} if self.decays else {}
        if self.argument is not None:
            settings[self.argument] = int(value) if self.is_count else value
        if self.keyword == "cosine":
            settings["steps"] = args.steps
        method: Callable[..., methods.Baseline] = getattr(methods, self.method)
        return method(args.params, **settings)


_METHODS = {
    "decoupled": ("DecoupledDecay", "decoupled weight decay"),
    "adadecay": ("AdaDecay", "AdaDecay"),
    "awd": ("AdaptiveWeightDecay", "adaptive weight decay"),
    "cosine": ("CosineDecay", "weight decay on a half cosine"),
    "rescale": ("NormRescaling", "rescaling to the initial norm"),
    "corrected": ("CorrectedDecay", "decay corrected for normalized layers (AdamC, SGDC)"),
    "cautious": ("CautiousDecay", "cautious weight decay"),
    "independent": ("IndependentDecay", "weight decay independent of the highest learning rate"),
    "norm": ("WeightNormControl", "weight norm control towards the initial norm"),
    "normws": ("WeightNormControl", "weight norm control towards the norm after N steps"),
    "hyperball": ("Hyperball", "hyperball: fixed norms of each matrix and its update"),
}
"""Class and title of each method by its keyword."""
_NUMBERS = {
    "adadecay": ("alpha", "alpha"),
    "cosine": ("final", "the last weight decay as a multiple of the first"),
    "rescale": ("factor", "factor"),
    "norm": ("factor", "the target as a multiple of it"),
    "normws": ("start", "the number of steps"),
}
"""Argument and meaning of the number in the name, by keyword."""
BASELINES = {
    keyword: BaselineEntry(keyword, *names, *_NUMBERS.get(keyword, ()))
    for keyword, names in _METHODS.items()
}
