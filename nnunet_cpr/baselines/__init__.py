"""Comparison methods of the CPR paper and since then, each attachable to any torch optimizer.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    optimizer = AdaDecay(model, weight_decay=1e-2, alpha=4.0).attach(optimizer)

To add one: write a subclass of :class:`Baseline` in a new module and list it in :data:`BASELINES`. The
nnU-Net trainers and the vision runs then find it by its keyword. List it in
``benchmarks/competitors.py`` to measure its cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nnunet_cpr.baselines._base import Baseline
from nnunet_cpr.baselines.adadecay import AdaDecay
from nnunet_cpr.baselines.adaptive import AdaptiveWeightDecay
from nnunet_cpr.baselines.amos import amos
from nnunet_cpr.baselines.cautious import CautiousDecay
from nnunet_cpr.baselines.decoupled import CosineDecay, DecoupledDecay
from nnunet_cpr.baselines.hyperball import Hyperball
from nnunet_cpr.baselines.norm_control import WeightNormControl
from nnunet_cpr.baselines.peak_lr import CorrectedDecay, IndependentDecay
from nnunet_cpr.baselines.rescaling import NormRescaling
from nnunet_cpr.param_groups import Params

__all__ = [
    "BASELINES",
    "AdaDecay",
    "AdaptiveWeightDecay",
    "Baseline",
    "BaselineArgs",
    "BaselineEntry",
    "CautiousDecay",
    "CorrectedDecay",
    "CosineDecay",
    "DecoupledDecay",
    "Hyperball",
    "IndependentDecay",
    "NormRescaling",
    "WeightNormControl",
    "amos",
]


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
            lambda a, _: DecoupledDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "adadecay", "AdaDecay", lambda a, v: AdaDecay(a.params, a.weight_decay, v), "alpha"
        ),
        BaselineEntry(
            "awd", "adaptive weight decay", lambda a, _: AdaptiveWeightDecay(a.params, a.weight_decay)
        ),
        BaselineEntry(
            "cosine",
            "weight decay on a half cosine",
            lambda a, v: CosineDecay(a.params, a.weight_decay, v, steps=a.steps),
            "the last weight decay as a multiple of the first",
        ),
        BaselineEntry(
            "rescale",
            "rescaling to the initial norm",
            lambda a, v: NormRescaling(a.params, v),
            "factor",
            decays=False,
        ),
        BaselineEntry(
            "corrected",
            "decay corrected for normalized layers (AdamC, SGDC)",
            lambda a, _: CorrectedDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "cautious",
            "cautious weight decay",
            lambda a, _: CautiousDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "independent",
            "weight decay independent of the highest learning rate",
            lambda a, _: IndependentDecay(a.params, a.weight_decay),
        ),
        BaselineEntry(
            "norm",
            "weight norm control towards the initial norm",
            lambda a, v: WeightNormControl(a.params, a.weight_decay, v),
            "the target as a multiple of it",
        ),
        BaselineEntry(
            "normws",
            "weight norm control towards the norm after N steps",
            lambda a, n: WeightNormControl(a.params, a.weight_decay, start=int(n)),
            "the number of steps",
            is_count=True,
        ),
        BaselineEntry(
            "hyperball",
            "hyperball: fixed norms of each matrix and its update",
            lambda a, _: Hyperball(a.params),
            decays=False,
        ),
    )
}
