from ._amos import amos
from ._base import Baseline
from ._methods import (
    AdaDecay,
    AdaptiveWeightDecay,
    CautiousDecay,
    CorrectedDecay,
    CosineDecay,
    DecoupledDecay,
    Hyperball,
    IndependentDecay,
    NormRescaling,
    WeightNormControl,
)

__all__ = [
    "AdaDecay",
    "AdaptiveWeightDecay",
    "Baseline",
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
