"""Sweeps that a CPU trains in minutes: digits and modular addition."""

from __future__ import annotations

from typing import Any

from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.names import BaselineChoice
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision.sweeps.sweep import Axis, Panel, Sweep
from nnunet_cpr.vision.task import Task
from nnunet_cpr.vision.tasks.digits import DIGITS
from nnunet_cpr.vision.tasks.grokking import GROKKING

_SEEDS = (1, 2, 3, 4, 5)


def _methods(title: str, names: dict[str, RunName]) -> Panel:
    """Return a panel of one column with a method in each row."""
    return Panel(
        title, Axis("", tuple(names)), Axis("", ("",)), tuple((name,) for name in names.values())
    )


def _adamw(weight_decay: float) -> RunName:
    return RunName("AdamW", weight_decay=weight_decay)


def _baseline(keyword: str, value: float | None = None, family: str = "AdamW", **fields: Any) -> RunName:
    return RunName(family, baseline=BaselineChoice(keyword, value), **fields)


def _recent_methods(task: Task, weight_decay: float, warm_start: int) -> dict[str, RunName]:
    """Return the methods since the paper that apply to every network.

    Args:
        task: the task.
        weight_decay: weight decay of AdamW, also of the other methods.
        warm_start: number of steps after which the norm is held.
    """
    # Independent decay is not multiplied by the learning rate, so this is the same initial strength.
    per_step = float(f"{task.lr['adam'] * weight_decay:.3g}")
    return {
        "cautious": _baseline("cautious", weight_decay=weight_decay),
        "independent decay": _baseline("independent", weight_decay=per_step),
        "initial norm": _baseline("norm", 1.0, weight_decay=weight_decay),
        f"norm after {warm_start}": _baseline("normws", warm_start, weight_decay=weight_decay),
        "hyperball": _baseline("hyperball"),
    }


DIGITS_SWEEP = Sweep(
    "digits",
    "digits: every bound, AdamW, and the comparison methods",
    DIGITS.name,
    (
        _methods("AdamW", {f"weight decay {wd:g}": _adamw(wd) for wd in (0.0, 0.01, 0.1, 1.0)}),
        _methods(
            "AdamCPR",
            {
                "Kappa-K 0.02": RunName("AdamCPR", kappa=KappaK(0.02)),
                "Kappa-kI0 2": RunName("AdamCPR", kappa=KappaKI0(2)),
                "Kappa-WS 60": RunName("AdamCPR", kappa=KappaWS(60)),
                "Kappa-IP 3": RunName("AdamCPR", kappa=KappaIP(3)),
                "AdaCPR, WS 60": RunName("AdamCPR", kappa=KappaWS(60), adaptive=True),
            },
        ),
        _methods(
            "other methods",
            {
                "AdaDecay": _baseline("adadecay", 4.0),
                "AWD": _baseline("awd"),
                "cosine decay": _baseline("cosine", 0.1),
                "rescaling": _baseline("rescale", 2.0),
                "AMOS": RunName("AMOS"),
            },
        ),
        _methods(
            "methods since the paper",
            {
                "corrected": _baseline("corrected", weight_decay=0.01),
                **_recent_methods(DIGITS, 0.01, 60),
            },
        ),
        _methods(
            "SGD",
            {
                "weight decay": RunName("SGD"),
                "decoupled": _baseline("decoupled", family="SGD"),
                "SGDCPR, WS 60": RunName("SGDCPR", kappa=KappaWS(60)),
            },
        ),
        _methods(
            "Muon",
            {
                "weight decay": RunName("Muon"),
                "MuonCPR, WS 60": RunName("MuonCPR", kappa=KappaWS(60)),
            },
        ),
    ),
    _SEEDS,
    across=6,
    curves=("accuracy", "loss"),
)

GROKKING_SWEEP = Sweep(
    "grokking",
    "grokking: modular addition, accuracy on training pairs and on unseen pairs",
    GROKKING.name,
    (
        _methods("AdamW", {f"weight decay {wd:g}": _adamw(wd) for wd in (0.0, 0.3, 1.0)}),
        _methods(
            "AdamCPR",
            {
                "Kappa-WS 100": RunName("AdamCPR", kappa=KappaWS(100)),
                "Kappa-IP 10": RunName("AdamCPR", kappa=KappaIP(10)),
            },
        ),
        # The network has no normalization, so corrected decay is that of AdamW.
        _methods("methods since the paper", _recent_methods(GROKKING, 1.0, 100)),
        _methods(
            "Muon",
            {
                "weight decay 1": RunName("Muon", weight_decay=1.0),
                "MuonCPR, WS 100": RunName("MuonCPR", kappa=KappaWS(100)),
            },
        ),
    ),
    _SEEDS,
    across=4,
    curves=("train_accuracy", "accuracy"),
)
