from .base import Baseline
from .decays import (
    AdaDecay,
    AdaptiveWeightDecay,
    CautiousDecay,
    CorrectedDecay,
    CosineDecay,
    DecoupledDecay,
    IndependentDecay,
    amos,
)
from .norms import Hyperball, NormRescaling, WeightNormControl

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
