"""Sweeps that a CPU trains in minutes: digits and modular addition."""

from __future__ import annotations

from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.names import BaselineChoice
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision.sweeps.sweep import Axis, Panel, Sweep
from nnunet_cpr.vision.tasks.digits import DIGITS
from nnunet_cpr.vision.tasks.grokking import GROKKING


def _methods(title: str, names: dict[str, RunName]) -> Panel:
    """Return a panel of one column with a method in each row."""
    return Panel(
        title, Axis("", tuple(names)), Axis("", ("",)), tuple((name,) for name in names.values())
    )


def _adamw(weight_decay: float) -> RunName:
    return RunName("AdamW", weight_decay=weight_decay)


def _baseline(keyword: str, value: float | None = None, family: str = "AdamW") -> RunName:
    return RunName(family, baseline=BaselineChoice(keyword, value))


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
            "SGD",
            {
                "weight decay": RunName("SGD"),
                "decoupled": _baseline("decoupled", family="SGD"),
                "SGDCPR, WS 60": RunName("SGDCPR", kappa=KappaWS(60)),
            },
        ),
    ),
    DIGITS.seeds,
    across=4,
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
    ),
    GROKKING.seeds,
    across=2,
    curves=("train_accuracy", "accuracy"),
)
