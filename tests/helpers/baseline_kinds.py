"""Builders of all comparison methods, for parametrized tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nnunet_cpr.baselines import (
    AdaDecay,
    AdaptiveWeightDecay,
    Baseline,
    CautiousDecay,
    CorrectedDecay,
    CosineDecay,
    DecoupledDecay,
    Hyperball,
    IndependentDecay,
    NormRescaling,
    WeightNormControl,
)
from nnunet_cpr.cpr.regularized_parameters import param_groups, select


def corrected_everywhere(params) -> CorrectedDecay:
    """Return corrected decay of all matrices, whether the parameters are in a module or in a list."""
    groups = param_groups(params)
    return CorrectedDecay(groups, 0.5, normalized=[name for name, _, _ in select(groups)])


KINDS: dict[str, Callable[..., Baseline]] = {
    "decoupled": lambda params: DecoupledDecay(params, 0.5),
    "cosine": lambda params: CosineDecay(params, 0.5, 0.1, steps=10),
    "adadecay": lambda params: AdaDecay(params, 0.5, 4.0),
    "awd": lambda params: AdaptiveWeightDecay(params, 0.5),
    "rescale": lambda params: NormRescaling(params, 0.8),
    "corrected": corrected_everywhere,
    "cautious": lambda params: CautiousDecay(params, 0.5),
    "independent": lambda params: IndependentDecay(params, 0.05),
    "norm": lambda params: WeightNormControl(params, 0.5, 0.8),
    "hyperball": lambda params: Hyperball(params),
}
every_baseline = pytest.mark.parametrize("kind", KINDS)
