"""Sweeps by name. To add one, build its panels with :func:`grid` and list it here."""

from nnunet_cpr.vision.sweeps.cifar100 import CIFAR100_SWEEPS
from nnunet_cpr.vision.sweeps.imagenet import IMAGENET_SWEEPS
from nnunet_cpr.vision.sweeps.small import DIGITS_SWEEP, GROKKING_SWEEP
from nnunet_cpr.vision.sweeps.sweep import Axis, Panel, Sweep, grid
from nnunet_cpr.vision.sweeps.tuned import (
    CIFAR10_LONG_SWEEP,
    CIFAR10_STEPS_SWEEP,
    CIFAR10_SWEEP,
    TEXT_LONG_SWEEP,
    TEXT_SWEEP,
)

__all__ = ["SWEEPS", "Axis", "Panel", "Sweep", "grid"]

SWEEPS: dict[str, Sweep] = {
    sweep.name: sweep
    for sweep in (
        DIGITS_SWEEP,
        GROKKING_SWEEP,
        CIFAR10_SWEEP,
        CIFAR10_STEPS_SWEEP,
        CIFAR10_LONG_SWEEP,
        TEXT_SWEEP,
        TEXT_LONG_SWEEP,
        *CIFAR100_SWEEPS,
        *IMAGENET_SWEEPS,
    )
}
