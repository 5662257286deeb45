"""Builders of all comparison methods, for parametrized tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nnunet_cpr.baselines import (
    AdaDecay,
    AdaptiveWeightDecay,
    Baseline,
    CosineDecay,
    DecoupledDecay,
    NormRescaling,
)

KINDS: dict[str, Callable[..., Baseline]] = {
    "decoupled": lambda params: DecoupledDecay(params, 0.5),
    "cosine": lambda params: CosineDecay(params, 0.5, 0.1, steps=10),
    "adadecay": lambda params: AdaDecay(params, 0.5, 4.0),
    "awd": lambda params: AdaptiveWeightDecay(params, 0.5),
    "rescale": lambda params: NormRescaling(params, 0.8),
}
every_baseline = pytest.mark.parametrize("kind", KINDS)


def matrix(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.full((2, 3), value, dtype=dtype))
    p.grad = torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype)
    return p


def same_states(mine: dict, theirs: dict) -> bool:
    assert mine["config"] == theirs["config"] and mine["names"] == theirs["names"]
    assert mine["state"].keys() == theirs["state"].keys()
    return all(torch.equal(value, theirs["state"][key]) for key, value in mine["state"].items())
