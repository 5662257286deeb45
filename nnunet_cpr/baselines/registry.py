"""Registry of the comparison methods, for names of trainers and vision runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnunet_cpr import baselines as methods

if TYPE_CHECKING:
    from nnunet_cpr.cpr.regularized_parameters import Params


@dataclass(frozen=True)
class BaselineEntry:
    """Comparison method in names of trainers and vision runs: ``_<keyword>`` and its number, if any.

    Attributes:
        method: class in :mod:`nnunet_cpr.baselines`.
        title: the method in a few words; N or V is the number in the name.
        argument: argument of the class for the number in the name, None if there is no number.
    """

    keyword: str
    method: str
    title: str
    argument: str | None = None

    @property
    def decays(self) -> bool:
        """True if it has a weight decay."""
        return self.keyword not in ("rescale", "hyperball")

    @property
    def is_count(self) -> bool:
        """True if the number is a whole number."""
        return self.argument == "start"

    @property
    def needs_length(self) -> bool:
        """True if it follows the length of the training."""
        return self.keyword == "cosine"

    def build(
        self, params: Params, weight_decay: float, steps: int | None, value: float | None = None
    ) -> methods.Baseline:
        """Build the method.

        Args:
            params: the parameters to regularize.
            weight_decay: weight decay of the method, if it has one.
            steps: optimizer steps of the whole training, if the method follows them.
            value: the number in the name.
        """
        settings: dict[str, Any] = {"weight_decay": weight_decay} if self.decays else {}
        if self.argument is not None:
            settings[self.argument] = value
        if self.needs_length:
            settings["steps"] = steps
        return getattr(methods, self.method)(params, **settings)


_METHODS = {
    "decoupled": ("DecoupledDecay", "decoupled weight decay"),
    "adadecay": ("AdaDecay", "AdaDecay; V is alpha", "alpha"),
    "awd": ("AdaptiveWeightDecay", "adaptive weight decay"),
    "cosine": ("CosineDecay", "weight decay on a half cosine; V is its last value / the first", "final"),
    "rescale": ("NormRescaling", "rescaling to V times the initial norm", "factor"),
    "corrected": ("CorrectedDecay", "decay corrected for normalized layers (AdamC, SGDC)"),
    "cautious": ("CautiousDecay", "cautious weight decay"),
    "independent": ("IndependentDecay", "weight decay independent of the highest learning rate"),
    "norm": ("WeightNormControl", "weight norm control towards V times the initial norm", "factor"),
    "normws": ("WeightNormControl", "weight norm control towards the norm after N steps", "start"),
    "hyperball": ("Hyperball", "hyperball: fixed norms of each matrix and its update"),
}
"""Class and title of each method by its keyword, and the argument for the number in the name."""
BASELINES = {keyword: BaselineEntry(keyword, *entry) for keyword, entry in _METHODS.items()}
