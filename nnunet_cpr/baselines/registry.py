"""Registry of the comparison methods, for names of trainers and vision runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnunet_cpr import baselines as methods

if TYPE_CHECKING:
    from nnunet_cpr.baselines import Baseline
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
        title: the method in a few words.
        build: function of the arguments and the number in the name.
        setting: meaning of the number, None if there is no number.
        decays: True if it has a weight decay.
        is_count: True if the number is a whole number.
    """

    keyword: str
    title: str
    build: Callable[[BaselineArgs, float], Baseline]
    setting: str | None = None
    decays: bool = True
    is_count: bool = False


BASELINES: dict[str, BaselineEntry] = {
    entry.keyword: entry
    for entry in (
        BaselineEntry(
            "decoupled",
            "decoupled weight decay",
            lambda a, _: methods.DecoupledDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "adadecay", "AdaDecay", lambda a, v: methods.AdaDecay(a.params, a.weight_decay, v), "alpha"
        ),
        BaselineEntry(
            "awd",
            "adaptive weight decay",
            lambda a, _: methods.AdaptiveWeightDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "cosine",
            "weight decay on a half cosine",
            lambda a, v: methods.CosineDecay(a.params, a.weight_decay, v, steps=a.steps),
            "the last weight decay as a multiple of the first",
        ),
        BaselineEntry(
            "rescale",
            "rescaling to the initial norm",
            lambda a, v: methods.NormRescaling(a.params, v),
            "factor",
            decays=False,
        ),
        BaselineEntry(
            "corrected",
            "decay corrected for normalized layers (AdamC, SGDC)",
            lambda a, _: methods.CorrectedDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "cautious",
            "cautious weight decay",
            lambda a, _: methods.CautiousDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "independent",
            "weight decay independent of the highest learning rate",
            lambda a, _: methods.IndependentDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "norm",
            "weight norm control towards the initial norm",
            lambda a, v: methods.WeightNormControl(a.params, a.weight_decay, v),
            "the target as a multiple of it",
        ),
        BaselineEntry(
            "normws",
            "weight norm control towards the norm after N steps",
            lambda a, n: methods.WeightNormControl(a.params, a.weight_decay, start=int(n)),
            "the number of steps",
            is_count=True,
        ),
        BaselineEntry(
            "hyperball",
            "hyperball: fixed norms of each matrix and its update",
            lambda a, _: methods.Hyperball(a.params),
            decays=False,
        ),
    )
}
