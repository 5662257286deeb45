"""Tasks: a model, its data, and the settings that a run's name leaves out.

To add a task, write a module in :mod:`nnunet_cpr.vision.tasks` that defines a :class:`Task`, and list it
in :data:`nnunet_cpr.vision.tasks.TASKS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.names.training import default_lr

Pairs = tuple[Tensor, Tensor]
"""Inputs ``[N, ...]`` and class labels, ``[N]`` or ``[N, L]``."""
Metrics = dict[str, float]


@dataclass(frozen=True)
class Setup:
    """Model, batches and evaluation of a task, trained with the cross-entropy.

    Attributes:
        model: model on the CPU, initialized with torch's global generator.
        batches: function that yields the batches of an epoch, on any device. It draws random numbers
            only from torch's global generator on the CPU, which is seeded before each epoch, so that a
            resumed run equals an uninterrupted one.
        evaluate: function of the model in evaluation mode that returns the metrics by name, among them
            ``loss`` and ``accuracy``.
        evaluate_last: like ``evaluate``, for metrics that are computed only after the last step.
    """

    model: nn.Module
    batches: Callable[[], Iterator[Pairs]]
    evaluate: Callable[[nn.Module], Metrics]
    evaluate_last: Callable[[nn.Module], Metrics] | None = None


@dataclass(frozen=True)
class Task:
    """Model, data, and the paper's settings for them.

    Attributes:
        name: name in commands and folders.
        setup: function that loads the data and builds the model, from the folder of the data set (None
            if it is not given) and the device that trains.
        steps: number of optimizer steps.
        warmup: number of steps of the linear learning-rate warm-up.
        lr: highest learning rate, by the optimizer of the family, such as ``adam`` or ``muon``.
        final_lr: final learning rate of the cosine, as a multiple of the highest.
        betas: hyperparameters of Adam.
        weight_decay: default weight decay, by the optimizer of the family; 0 for others.
        clip: maximum norm of the gradients, or None.
        epochs_between: number of epochs between evaluations, each with a checkpoint.

    Example:
        >>> from nnunet_cpr.names.run_name import parse_run_name
        >>> from nnunet_cpr.vision.tasks import TASKS
        >>> str(TASKS["digits"].complete(parse_run_name("AdamCPR_ws60")))
        'AdamCPR_ws60_lr0p01_warmup20_seed1_400steps'
    """

    name: str
    setup: Callable[[Path | None, torch.device], Setup]
    steps: int
    warmup: int
    lr: Mapping[str, float]
    final_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    clip: float | None = None
    epochs_between: int = 1

    def complete(self, name: RunName) -> RunName:
        """Return the name with the task's defaults for everything that it leaves out.

        Raises:
            WrongName: the warm-up is not shorter than the run, or the task has no learning rate
                or weight decay for the family and the name gives none.
        """
        optimizer = name.defaults.optimizer
        defaults: dict[str, Any] = {
            "lr": self.lr.get(optimizer) if name.timm is None else default_lr(name),
            "weight_decay": self.weight_decay.get(optimizer, 0.0) if name.decays else None,
            "warmup": self.warmup,
            "steps": self.steps,
            "seed": 1,
        }
        if name.lr is None and defaults["lr"] is None:
            raise WrongName(f"{name}: {self.name} has no learning rate for {name.family}", "add _lr<V>")
        if name.baseline is not None and name.weight_decay is None and defaults["weight_decay"] == 0:
            raise WrongName(
                f"{name}: {self.name} has no weight decay for {name.family}, so there is none to adapt",
                "add _wd<V>",
            )
        missing = {key: value for key, value in defaults.items() if getattr(name, key) is None}
        return dataclasses.replace(name, **missing)
