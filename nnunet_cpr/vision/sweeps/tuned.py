"""Sweeps that compare tuned weight decay with CPR's default, on a CPU.

Settings are chosen by a validation metric and compared on test data
(:func:`nnunet_cpr.vision.selection.compare_methods`). The comparisons of ``cifar10-long`` and
``text-long`` were fixed before their runs, which have seeds of their own.
"""

from __future__ import annotations

from typing import Any

from nnunet_cpr.bounds import KappaIP, KappaWS
from nnunet_cpr.names import BaselineChoice
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision.sweeps.sweep import Axis, AxisValues, Panel, Sweep, axis_values, grid
from nnunet_cpr.vision.tasks.cifar10 import CIFAR10
from nnunet_cpr.vision.tasks.text import TEXT

_Lines = tuple[str, AxisValues]

_DEFAULT: _Lines = ("", {"default": {}})


def _lr(*values: float) -> _Lines:
    return "learning rate", axis_values("lr", values)


def _weight_decay(*values: float) -> _Lines:
    return "weight decay", axis_values("weight_decay", values)


def _warm_start(*steps: int) -> _Lines:
    return "warm start (steps)", {str(n): {"kappa": KappaWS(n)} for n in steps}


def _method(title: str, rows: _Lines, columns: _Lines, family: str, **fields: Any) -> Panel:
    return grid(title, rows, columns, family, methods="panel", **fields)


def _by_steps(title: str, rows: _Lines, family: str, compared_with: str, **fields: Any) -> Panel:
    """Return a panel with a method for each length of training."""
    columns = "steps", {"200": {"steps": 200}, "600": {}, "1800": {"steps": 1800}}
    return grid(title, rows, columns, family, methods="columns", compared_with=compared_with, **fields)


def _comparison_methods() -> Panel:
    """Return AdamW's comparison methods with the task's learning rate and weight decay."""
    chosen = {
        "cautious": BaselineChoice("cautious", None),
        "corrected": BaselineChoice("corrected", None),
        "cosine": BaselineChoice("cosine", 0.1),
        "initial norm": BaselineChoice("norm", 1.0),
        "norm after 60": BaselineChoice("normws", 60),
        "hyperball": BaselineChoice("hyperball", None),
        "AdaDecay": BaselineChoice("adadecay", 4.0),
        "AWD": BaselineChoice("awd", None),
    }
    names = tuple((RunName("AdamW", baseline=choice),) for choice in chosen.values())
    labels = Axis("", tuple(chosen)), Axis("", ("",))
    return Panel("AdamW, other", *labels, names, compared_with="AdamW")


_SGD_LR, _ADAM_LR = _lr(0.03, 0.1, 0.3), _lr(3e-3, 1e-2, 3e-2)

CIFAR10_SWEEP = Sweep(
    "cifar10",
    "cifar10: tuned weight decay, CPR's default, and CPR with tuned warm starts",
    CIFAR10.name,
    (
        _method("SGD", _weight_decay(1e-4, 5e-4, 2e-3, 5e-3, 2e-2), _SGD_LR, "SGD"),
        _method("SGD + CPR, default", _DEFAULT, _SGD_LR, "SGDCPR", compared_with="SGD"),
        _method(
            "SGD + CPR, warm start", _warm_start(20, 60, 200), _SGD_LR, "SGDCPR", compared_with="SGD"
        ),
        _method("AdamW", _weight_decay(0.01, 0.1, 0.3, 1.0, 3.0), _ADAM_LR, "AdamW"),
        _method("Adam + CPR, default", _DEFAULT, _ADAM_LR, "AdamCPR", compared_with="AdamW"),
        _method(
            "Adam + CPR, warm start",
            _warm_start(20, 60, 200),
            _ADAM_LR,
            "AdamCPR",
            compared_with="AdamW",
        ),
        _method("Muon", _weight_decay(0.01, 0.1, 1.0), _ADAM_LR, "Muon"),
        _method("Muon + CPR, default", _DEFAULT, _ADAM_LR, "MuonCPR", compared_with="Muon"),
        _comparison_methods(),
    ),
    seeds=CIFAR10.seeds,
    across=3,
)

_WARM_STARTS = _warm_start(20, 120)

CIFAR10_STEPS_SWEEP = Sweep(
    "cifar10-steps",
    "cifar10: tuned weight decay and CPR's default with fewer and with more steps",
    CIFAR10.name,
    (
        _by_steps("SGD", _weight_decay(1e-4, 5e-4, 2e-3, 5e-3, 2e-2), "SGD", "SGD", lr=0.1),
        _by_steps("SGD + CPR, default", _DEFAULT, "SGDCPR", "SGD", lr=0.1),
        _by_steps("SGD + CPR, warm start", _WARM_STARTS, "SGDCPR", "SGD", lr=0.1),
        _by_steps("SGD, not tuned", _weight_decay(5e-4), "SGD", "SGD + CPR, default", lr=0.1),
        _by_steps("AdamW", _weight_decay(0.01, 0.1, 0.3, 1.0, 3.0), "AdamW", "AdamW", lr=1e-2),
        _by_steps("Adam + CPR, default", _DEFAULT, "AdamCPR", "AdamW", lr=1e-2),
        _by_steps("Adam + CPR, warm start", _WARM_STARTS, "AdamCPR", "AdamW", lr=1e-2),
        _by_steps("AdamW, not tuned", _weight_decay(0.1), "AdamW", "Adam + CPR, default", lr=1e-2),
    ),
    seeds=CIFAR10.seeds,
    across=4,
)

_ONE: _Lines = ("", {"": {}})


def _long(title: str, family: str, compared_with: str, **fields: Any) -> Panel:
    """Return a panel with one run of 5,000 steps."""
    return _method(title, _ONE, _ONE, family, compared_with=compared_with, steps=5000, **fields)


CIFAR10_LONG_SWEEP = Sweep(
    "cifar10-long",
    "cifar10: CPR's default, the task's weight decay, and the best one of 1,800 steps, in 5,000 steps",
    CIFAR10.name,
    (
        _long("SGD", "SGD", "SGD"),
        _long("SGD + CPR", "SGDCPR", "SGD"),
        _long("SGD, 5e-3", "SGD", "SGD + CPR", weight_decay=5e-3),
        _long("AdamW", "AdamW", "AdamW"),
        _long("Adam + CPR", "AdamCPR", "AdamW"),
        _long("AdamW, 0.3", "AdamW", "Adam + CPR", weight_decay=0.3),
    ),
    seeds=tuple(range(6, 16)),  # not those of the sweeps that the hypotheses come from
)

_TEXT_LR = _lr(1e-3, 3e-3, 1e-2, 3e-2)

TEXT_SWEEP = Sweep(
    "text",
    "text: AdamW and Adam + CPR with fewer steps, each with its whole schedule",
    TEXT.name,
    (
        _method("AdamW, 800 steps", _weight_decay(0.01, 0.1, 1.0), _TEXT_LR, "AdamW"),
        _method("AdamW, 600 steps", _weight_decay(0.1), _TEXT_LR, "AdamW", steps=600),
        _method("AdamW, 400 steps", _weight_decay(0.1), _TEXT_LR, "AdamW", steps=400),
        _method("Adam + CPR, 800 steps", _DEFAULT, _TEXT_LR, "AdamCPR"),
        _method("Adam + CPR, 600 steps", _DEFAULT, _TEXT_LR, "AdamCPR", steps=600),
        _method("Adam + CPR, 400 steps", _DEFAULT, _TEXT_LR, "AdamCPR", steps=400),
        _method("Adam + CPR, warm start", _warm_start(80, 160, 400), _TEXT_LR, "AdamCPR"),
    ),
    seeds=TEXT.seeds,
    across=3,
)


def _text_long(title: str, family: str, steps: int, **fields: Any) -> Panel:
    """Return a panel with one run, with the learning rate that is best in 800 steps."""
    return _method(f"{title}, {steps:,} steps", _ONE, _ONE, family, lr=1e-2, steps=steps, **fields)


_PAPERS_INTERVAL = TEXT.warmup // 10

TEXT_LONG_SWEEP = Sweep(
    "text-long",
    "text: AdamW in 2,400 steps, and Adam + CPR in as many and in two thirds of them",
    TEXT.name,
    (
        _text_long("AdamW", "AdamW", 2400),
        _text_long("Adam + CPR", "AdamCPR", 2400),
        _text_long("Adam + CPR", "AdamCPR", 1600),
        _text_long("Adam + CPR, inflection point", "AdamCPR", 2400, kappa=KappaIP(_PAPERS_INTERVAL)),
        _text_long("Adam + CPR, inflection point", "AdamCPR", 1600, kappa=KappaIP(_PAPERS_INTERVAL)),
    ),
    seeds=(4, 5, 6, 7, 8),  # not those of text, which chose the learning rate and the weight decay
)
