from ._amos import amos
from ._base import Baseline
from .adadecay import AdaDecay
from .adaptive import AdaptiveWeightDecay
from .cautious import CautiousDecay
from .decoupled import CosineDecay, DecoupledDecay
from .hyperball import Hyperball
from .norm_control import WeightNormControl
from .peak_lr import CorrectedDecay, IndependentDecay
from .rescaling import NormRescaling

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
