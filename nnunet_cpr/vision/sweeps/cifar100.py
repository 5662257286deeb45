"""Sweeps of the paper's CIFAR-100 heat maps.

The paper shows its figures without numbers. Ranges whose ends it states are sampled in powers of two.
The paper does not state the learning rates, the weight decays, the factor of Kappa-kI0 in the sweep over
mu, and the alpha of AdaDecay in the comparison with related work; these values are our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.names import BaselineChoice
from nnunet_cpr.vision.sweeps.sweep import AxisValues, Panel, Sweep, axis_values, grid
from nnunet_cpr.vision.tasks.cifar100 import CIFAR100, CIFAR100_C

_LR = ("learning rate", axis_values("lr", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)))
_SGD_LR = ("learning rate", axis_values("lr", (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)))

# As many as warm starts, so that both methods are tuned equally.
_WD = ("weight decay", axis_values("weight_decay", (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)))
# SGD adds weight decay to the gradient, so its values are on another scale than AdamW's.
_SGD_WD = ("weight decay", axis_values("weight_decay", (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)))

# The paper's text ends at 4,000 steps, its table of hyperparameters at 16,000.
_STEPS = (250, 500, 1000, 2000, 4000, 8000, 16000)
_WS = ("warm start (steps)", {str(steps): {"kappa": KappaWS(steps)} for steps in _STEPS})
_K = (
    "kappa",
    {f"{value:g}": {"kappa": KappaK(value)} for value in (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)},
)
_KI0 = (
    "factor k",
    {str(factor): {"kappa": KappaKI0(factor)} for factor in (4, 8, 16, 32, 64, 128, 256)},
)
_MU = ("mu", axis_values("mu", (0.01, 0.1, 1.0, 10.0)))

# The paper's table begins with a factor of 0, read here as plain Adam because no norm can be kept at 0.
# It ends at 16, which is reached by doubling from 1 but not from 0.8.
_RESCALE: tuple[str, AxisValues] = (
    "factor of the norm",
    {
        "none": {"weight_decay": 0.0},
        **{
            f"{v:g}": {"baseline": BaselineChoice("rescale", v)} for v in (0.8, 1.0, 2.0, 4.0, 8.0, 16.0)
        },
    },
)


def _ip(warmup: int = CIFAR100.warmup) -> tuple[str, AxisValues]:
    """Return the axis of Kappa-IP, whose only value is a tenth of the warm-up."""
    return ("", {"IP": {"kappa": KappaIP(warmup // 10)}})


def _adamw(**fields: Any) -> Panel:
    return grid("AdamW", _WD, _LR, "AdamW", **fields)


def _adamcpr_ip() -> Panel:
    return grid("AdamCPR, Kappa-IP", _ip(), _LR, "AdamCPR")


def _adamcpr_ws(title: str = "AdamCPR, Kappa-WS", **fields: Any) -> Panel:
    return grid(title, _WS, _LR, "AdamCPR", **fields)


def _adadecay(alpha: float) -> Panel:
    title = f"Adam with AdaDecay, alpha {alpha:g}"
    return grid(title, _WD, _LR, "AdamW", baseline=BaselineChoice("adadecay", alpha))


def _cosine(final: float) -> Panel:
    title = f"Adam, weight decay to {final:g} times its first value"
    rows = ("first weight decay", _WD[1])
    return grid(title, rows, _LR, "AdamW", baseline=BaselineChoice("cosine", final))


def _with_warmup(warmup: int) -> list[Panel]:
    # The task's default is left out, so that the runs are shared with the other sweeps.
    field = None if warmup == CIFAR100.warmup else warmup
    suffix = f"warm-up {warmup}"
    return [
        grid(f"AdamW, {suffix}", _WD, _LR, "AdamW", warmup=field),
        grid(f"AdamCPR, Kappa-IP, {suffix}", _ip(warmup), _LR, "AdamCPR", warmup=field),
        grid(f"AdamCPR, Kappa-WS, {suffix}", _WS, _LR, "AdamCPR", warmup=field),
    ]


def _init() -> list[Panel]:
    bounds: dict[str, tuple[str, AxisValues]] = {"Kappa-K": _K, "Kappa-kI0": _KI0, "Kappa-WS": _WS}
    return [
        grid(f"{method}, {bound}", rows, _LR, "AdamCPR", adaptive=method == "AdaCPR")
        for bound, rows in bounds.items()
        for method in ("AdamCPR", "AdaCPR")
    ]


_REGULARIZER_TITLES = {
    "l2": "squared L2 norm",
    "std": "standard deviation",
    "l1": "L1 norm",
    "huber": "Huber",
}


def _regularizers(*regularizers: str) -> list[Panel]:
    # The default l2 is left out, so that the runs are shared with the other sweeps.
    return [
        _adamcpr_ws(
            f"AdamCPR, Kappa-WS, {_REGULARIZER_TITLES[regularizer]}",
            regularizer=None if regularizer == "l2" else regularizer,
        )
        for regularizer in regularizers
    ]


def _cifar100(name: str, about: str, panels: Sequence[Panel], across: int = 3) -> Sweep:
    task = CIFAR100_C if name == "noise" else CIFAR100
    return Sweep(f"cifar100-{name}", about, task.name, tuple(panels), task.seeds, across)


CIFAR100_SWEEPS = (
    _cifar100(
        "main",
        "CIFAR-100: AdamW, and AdamCPR with Kappa-IP and Kappa-WS",
        [_adamw(), _adamcpr_ip(), _adamcpr_ws()],
    ),
    _cifar100(
        "init",
        "CIFAR-100: Kappa-K, Kappa-kI0 and Kappa-WS, each with CPR and AdaCPR",
        _init(),
        across=2,
    ),
    _cifar100(
        "std",
        "CIFAR-100: squared L2 norm and standard deviation as the regularization function",
        _regularizers("l2", "std"),
        across=2,
    ),
    _cifar100(
        "measures",
        "CIFAR-100: all four regularization functions (not in the paper)",
        _regularizers("l2", "std", "l1", "huber"),
        across=2,
    ),
    _cifar100(
        "warmup",
        "CIFAR-100: 250, 500 and 1,000 steps of learning-rate warm-up",
        [panel for warmup in (250, 500, 1000) for panel in _with_warmup(warmup)],
    ),
    _cifar100(
        "schedules",
        "CIFAR-100: decreasing and increasing weight decay",
        [_adamw(), _adamcpr_ws(), *map(_cosine, (0.1, 0.01, 10.0, 100.0))],
        across=2,
    ),
    _cifar100(
        "noise",
        "CIFAR-100-C: mean accuracy on corrupted test images",
        [_adamw(), _adamcpr_ip(), _adamcpr_ws()],
    ),
    _cifar100(
        "sgd",
        "CIFAR-100: SGD with weight decay, and with CPR, Kappa-IP and Kappa-WS",
        [
            grid("SGD", _SGD_WD, _SGD_LR, "SGD"),
            grid("SGDCPR, Kappa-IP", _ip(), _SGD_LR, "SGDCPR"),
            grid("SGDCPR, Kappa-WS", _WS, _SGD_LR, "SGDCPR"),
        ],
    ),
    _cifar100(
        "adadecay",
        "CIFAR-100: AdaDecay with alpha 1 to 8",
        [_adamw(), _adamcpr_ws(), *map(_adadecay, (1.0, 2.0, 4.0, 8.0))],
        across=2,
    ),
    _cifar100(
        "related",
        "CIFAR-100: AdaDecay, AWD, AMOS and rescaling",
        [
            _adamw(),
            _adamcpr_ws(),
            _adadecay(4.0),
            grid("Adam with AWD", _WD, _LR, "AdamW", baseline=BaselineChoice("awd")),
            grid("AMOS", _WD, _LR, "AMOS"),
            grid("Adam with rescaling", _RESCALE, _LR, "AdamW"),
        ],
    ),
    _cifar100(
        "mu",
        "CIFAR-100: mu from 0.01 to 10",
        [
            grid("AdamCPR, Kappa-kI0 with k = 32", _MU, _LR, "AdamCPR", kappa=KappaKI0(32)),
            grid("AdamCPR, Kappa-WS with 1,000 steps", _MU, _LR, "AdamCPR", kappa=KappaWS(1000)),
        ],
        across=2,
    ),
)
