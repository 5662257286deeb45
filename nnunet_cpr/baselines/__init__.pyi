from ._amos import amos
from ._base import Baseline
from ._decays import CorrectedDecay, CosineDecay, DecoupledDecay, IndependentDecay
from ._gradient_decays import AdaDecay, AdaptiveWeightDecay, CautiousDecay
from ._norms import Hyperball, NormRescaling, WeightNormControl

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
