"""The paper's heat maps as lists of runs: which there are, and where each of them is in its figure.

The paper's text does not give the values along its axes. A range of which it says both ends is taken in
doublings; where it says nothing, the values are ours: all learning rates, all weight decays, the factor
of Kappa-kI0 in the sweep over mu, and the AdaDecay that is compared with other work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.naming import BaselineChoice
from nnunet_cpr.vision.names import RunName
from nnunet_cpr.vision.task import Task
from nnunet_cpr.vision.tasks.cifar100 import CIFAR100, CIFAR100_C
from nnunet_cpr.vision.tasks.imagenet import CLIP_VIT_B32, DEIT_BASE, DEIT_SMALL


@dataclass(frozen=True)
class Axis:
    """What the rows or the columns of a panel stand for.

    Attributes:
        title: the setting.
        labels: its values, from top to bottom or from left to right.
    """

    title: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """One heat map.

    Attributes:
        title: above it.
        rows, columns: its axes.
        names: its cells, row by row; a cell stands for its runs with all seeds and names none.

    Raises:
        ValueError: the cells are not as many as the labels.
    """

    title: str
    rows: Axis
    columns: Axis
    names: tuple[tuple[RunName, ...], ...]

    def __post_init__(self) -> None:
        shape = [len(self.columns.labels)] * len(self.rows.labels)
        if [len(row) for row in self.names] != shape:
            raise ValueError(f"the panel {self.title!r} has not one cell for each row and column")


@dataclass(frozen=True)
class Sweep:
    """A figure of heat maps with one scale of colours.

    Attributes:
        name: in commands and files.
        about: one line for the user.
        task: its name in :data:`nnunet_cpr.vision.tasks.TASKS`.
        panels: from left to right, then from top to bottom.
        seeds: of every cell.
        across: panels beside each other.
        published: what the paper reports, by the names of the runs without their seeds.
    """

    name: str
    about: str
    task: str
    panels: tuple[Panel, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    across: int = 3
    published: Mapping[str, float] = field(default_factory=dict)

    def cells(self) -> list[RunName]:
        """All runs, each once; those of the first seed first, so that the figure is soon complete."""
        names = [name for panel in self.panels for row in panel.names for name in row]
        runs = [dataclasses.replace(name, seed=seed) for seed in self.seeds for name in names]
        return list(dict.fromkeys(runs))


Settings = Mapping[str, Mapping[str, Any]]
"""Labels of an axis, and the fields of :class:`~nnunet_cpr.vision.names.RunName` that each means."""


def grid(
    title: str,
    rows: tuple[str, Settings],
    columns: tuple[str, Settings],
    family: str,
    **fields: Any,
) -> Panel:
    """A panel of all combinations of rows and columns.

    Args:
        title: above the panel.
        rows, columns: an axis' title and its settings.
        family: of all runs.
        fields: what all runs have in common besides.
    """
    return Panel(
        title,
        Axis(rows[0], tuple(rows[1])),
        Axis(columns[0], tuple(columns[1])),
        tuple(
            tuple(RunName(family, **fields, **row, **column) for column in columns[1].values())
            for row in rows[1].values()
        ),
    )


def settings(field: str, values: Sequence[Any]) -> Settings:
    """The settings of an axis along which one field takes some values."""
    return {f"{value:g}": {field: value} for value in values}


# CIFAR-100

_LR = ("learning rate", settings("lr", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)))
_SGD_LR = ("learning rate", settings("lr", (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)))

# As many as there are warm starts, so that neither side is tuned more than the other.
_WD = ("weight decay", settings("weight_decay", (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)))
# SGD's is added to the gradient, and so is not in the units of AdamW's.
_SGD_WD = ("weight decay", settings("weight_decay", (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)))

# The paper's text ends at 4,000, its table of hyperparameters at 16,000.
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
_MU = ("mu", settings("mu", (0.01, 0.1, 1.0, 10.0)))

# The paper's table begins with a factor of 0, which we read as plain Adam: no norm can be held at 0. It
# ends at 16, which doublings from 0.8 do not meet and those from 1 do.
_RESCALE: tuple[str, Settings] = (
    "factor of the norm",
    {
        "none": {"weight_decay": 0.0},
        **{
            f"{v:g}": {"baseline": BaselineChoice("rescale", v)} for v in (0.8, 1.0, 2.0, 4.0, 8.0, 16.0)
        },
    },
)


def _ip(warmup: int = CIFAR100.warmup) -> tuple[str, Settings]:
    """Kappa-IP has no parameter: it samples at a tenth of the warm-up."""
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
    # The task's own is not said, so that these are the runs of the other sweeps.
    field = None if warmup == CIFAR100.warmup else warmup
    says = f"warm-up {warmup}"
    return [
        grid(f"AdamW, {says}", _WD, _LR, "AdamW", warmup=field),
        grid(f"AdamCPR, Kappa-IP, {says}", _ip(warmup), _LR, "AdamCPR", warmup=field),
        grid(f"AdamCPR, Kappa-WS, {says}", _WS, _LR, "AdamCPR", warmup=field),
    ]


def _init() -> list[Panel]:
    bounds: dict[str, tuple[str, Settings]] = {"Kappa-K": _K, "Kappa-kI0": _KI0, "Kappa-WS": _WS}
    return [
        grid(f"{method}, {bound}", rows, _LR, "AdamCPR", adaptive=method == "AdaCPR")
        for bound, rows in bounds.items()
        for method in ("AdamCPR", "AdaCPR")
    ]


_NAMES_OF_MEASURES = {
    "l2": "squared L2 norm",
    "std": "standard deviation",
    "l1": "L1 norm",
    "huber": "Huber",
}


def _measures(*measures: str) -> list[Panel]:
    # l2 is what a name without a measure says; these are the runs of the other sweeps.
    return [
        _adamcpr_ws(
            f"AdamCPR, Kappa-WS, {_NAMES_OF_MEASURES[measure]}",
            regularizer=None if measure == "l2" else measure,
        )
        for measure in measures
    ]


def _cifar100(name: str, about: str, panels: Sequence[Panel], across: int = 3) -> Sweep:
    task = CIFAR100_C if name == "noise" else CIFAR100
    return Sweep(f"cifar100-{name}", about, task.name, tuple(panels), task.seeds, across)


_CIFAR100 = (
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
        "CIFAR-100: squared L2 norm and standard deviation as the measure",
        _measures("l2", "std"),
        across=2,
    ),
    _cifar100(
        "measures",
        "CIFAR-100: all four measures (not in the paper)",
        _measures("l2", "std", "l1", "huber"),
        across=2,
    ),
    _cifar100(
        "warmup",
        "CIFAR-100: 250, 500 and 1,000 steps of learning-rate warm-up",
        [panel for warmup in (250, 500, 1000) for panel in _with_warmup(warmup)],
    ),
    _cifar100(
        "schedules",
        "CIFAR-100: falling and rising weight decay",
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


# ImageNet


def _imagenet(
    task: Task,
    about: str,
    weight_decays: Sequence[float],
    published: Sequence[float | None],  # in the order of the paper's table; None where it has no number
) -> Sweep:
    lr: tuple[str, Settings] = ("learning rate", {f"{task.lr['adam']:g}": {}})
    warm_starts = {
        f"{times * task.warmup}": {"kappa": KappaWS(times * task.warmup)} for times in (1, 2, 4)
    }
    panels = (
        grid("AdamW", ("weight decay", settings("weight_decay", weight_decays)), lr, "AdamW"),
        grid("AdamCPR, Kappa-WS", (_WS[0], warm_starts), lr, "AdamCPR"),
        grid("AdamCPR, Kappa-IP", _ip(task.warmup), lr, "AdamCPR"),
    )
    names = [str(name) for panel in panels for row in panel.names for name in row]
    known = {name: number for name, number in zip(names, published, strict=True) if number is not None}
    return Sweep(task.name, about, task.name, panels, task.seeds, published=known)


_IMAGENET = (
    _imagenet(
        DEIT_SMALL,
        "ImageNet: DeiT-S with AdamW and AdamCPR",
        (0.005, 0.05, 0.5),
        (76.97, 79.03, 79.16, 79.81, 79.33, 78.04, 79.84),
    ),
    _imagenet(
        DEIT_BASE,
        "ImageNet: DeiT-B with AdamW and AdamCPR",
        (0.005, 0.05, 0.5),
        (76.19, 78.59, 80.56, 81.19, 79.61, None, 80.95),
    ),
    _imagenet(
        CLIP_VIT_B32,
        "ImageNet: CLIP ViT-B/32 fine-tuned with AdamW and AdamCPR",
        (1e-4, 1e-3, 1e-2, 0.1, 1.0),
        (75.24, 75.39, 75.32, 75.17, 74.4, 75.27, 75.52, 75.41, 75.40),
    ),
)


SWEEPS: dict[str, Sweep] = {sweep.name: sweep for sweep in (*_CIFAR100, *_IMAGENET)}
"""All sweeps by their names. To add one: make its panels with :func:`grid` and list it here."""
