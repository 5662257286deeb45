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
from nnunet_cpr.names.trainer_name import default_bound
from nnunet_cpr.optimizers.muon import DEFAULT_MOMENTUM

Batch = Any
"""Batch of a task: tensors in lists, tuples and dicts."""


class CannotDraw(ValueError):
    """Figure that cannot be drawn; the message is one line."""


class CannotTrain(RuntimeError):
    """Run that cannot start or resume; the message is one line."""


class Diverged(CannotTrain):
    """Run with a non-finite loss."""


class InUse(CannotTrain):
    """Run that another process trains."""


@dataclass(frozen=True)
class Options:
    """Options of a run, besides its name and that of its task.

    Attributes:
        data: folder of the data set; None for tasks that need none.
        device: device to train on.
        workers: number of processes that load data.
        bf16: train in bfloat16 with autocast instead of float32.
        microbatches: number of parts into which a batch is split to save memory.
        keep_model: save the trained weights in the run's folder.
        again: train a run again that is finished or has diverged; an interrupted run resumes.
        settings: settings of the task, such as ``model``.
    """

    data: Path | None = None
    device: torch.device = torch.device("cpu")
    workers: int = 0
    bf16: bool = False
    microbatches: int = 1
    keep_model: bool = False
    again: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """Model, batches, loss and evaluation of a task.

    Attributes:
        model: model on the CPU, initialized with torch's global generator.
        epoch: function that yields the batches of an epoch, by its number, on the CPU or on the
            device of the options. It draws random numbers only from the global generators of torch,
            NumPy and Python, which are seeded before each epoch, so that a resumed run equals an
            uninterrupted one.
        loss: function of the model and a batch that returns a scalar.
        evaluate: function of the model in evaluation mode that returns the metrics by name, among them
            ``loss`` and the task's metric.
        evaluate_last: like ``evaluate``, for metrics that are computed only after the last step.
    """

    model: nn.Module
    epoch: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    evaluate_last: Callable[[nn.Module], dict[str, float]] | None = None


@dataclass(frozen=True)
class Task:
    """Model, data, and the paper's settings for them.

    Attributes:
        name: name in commands and folders.
        about: one line for the list of tasks.
        setup: function that loads the data and builds the model.
        steps: number of optimizer steps.
        warmup: number of steps of the linear learning-rate warm-up.
        lr: highest learning rate, by the optimizer of the family, such as ``adam`` or ``muon``.
        final_lr: final learning rate of the cosine, as a multiple of the highest.
        first_lr: learning rate before the first step of the warm-up, as a multiple of the highest.
        betas, eps: hyperparameters of Adam.
        momentum: Nesterov momentum of SGD.
        weight_decay: default weight decay, by the optimizer of the family; 0 for others.
        clip: maximum norm of the gradients, or None.
        metric: metric by which runs are compared; larger is better.
        selection: metric on other data by which one of several settings is chosen, if there is one.
        epochs_between: number of epochs between evaluations, each with a checkpoint.
        seeds: seeds of the paper's runs.
        settings: keys of :attr:`Options.settings` that the task accepts.
        settings_without_effect: the keys among them that do not change a run.
        data_folders: folders in :attr:`Options.data` whose files identify the data set.
        data_suffix: end of the names of these files.
        path_settings: the keys of ``settings`` whose values can be paths.

    Example:
        >>> from nnunet_cpr.names.run_name import parse_run_name
        >>> from nnunet_cpr.vision.tasks import TASKS
        >>> str(TASKS["digits"].complete(parse_run_name("AdamCPR_ws60")))
        'AdamCPR_ws60_lr0p01_warmup20_seed1_400steps'
    """

    name: str
    about: str
    setup: Callable[[Options], Setup]
    steps: int
    warmup: int
    lr: Mapping[str, float]
    final_lr: float = 0.1
    first_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    clip: float | None = None
    metric: str = "accuracy"
    selection: str | None = None
    epochs_between: int = 1
    seeds: tuple[int, ...] = (1, 2, 3)
    settings: tuple[str, ...] = ()
    settings_without_effect: tuple[str, ...] = ()
    data_folders: tuple[str, ...] = ()
    data_suffix: str = ""
    path_settings: tuple[str, ...] = ()

    def check_settings(self, settings: Mapping[str, str]) -> None:
        """Check that the task accepts the settings.

        Raises:
            CannotTrain: the task has no such setting.
        """
        unknown = [key for key in settings if key not in self.settings]
        if unknown:
            advice = f"choose from {', '.join(self.settings)}" if self.settings else "it has no settings"
            raise CannotTrain(f"--set {unknown[0]}: unknown setting of {self.name}; {advice}")

    def complete(self, name: RunName) -> RunName:
        """Return the name with the task's defaults for everything that it leaves out.

        Raises:
            WrongName: the warm-up is not shorter than the run, or the task has no learning rate
                or weight decay for the family and the name gives none.
        """
        defaults = self._defaults(name)
        if name.lr is None and defaults["lr"] is None:
            raise WrongName(f"{name}: {self.name} has no learning rate for {name.family}; add _lr<V>")
        if name.baseline is not None and name.weight_decay is None and defaults["weight_decay"] == 0:
            raise WrongName(
                f"{name}: {self.name} has no weight decay for {name.family}, so there is none to adapt; "
                "add _wd<V>"
            )
        missing = {key: value for key, value in defaults.items() if getattr(name, key) is None}
        return dataclasses.replace(name, **missing)

    def shorten(self, name: RunName) -> RunName:
        """Return the name of the same run without the task's defaults, except for the seed.

        Raises:
            WrongName: see :meth:`complete`.
        """
        complete = self.complete(name)
        defaults = self._defaults(name)
        defaults |= {"mu": 1.0, "regularizer": "l2", "kappa": default_bound(complete.warmup_steps)}
        momentum = {"sgd": self.momentum, "muon": DEFAULT_MOMENTUM}
        defaults["momentum"] = momentum.get(name.defaults.optimizer)
        if complete.kappa is not None:  # of a share of the training
            complete = dataclasses.replace(complete, kappa=complete.bound)
        omitted: dict[str, Any] = {
            key: None for key, value in defaults.items() if getattr(complete, key) == value
        }
        return dataclasses.replace(complete, **(omitted | {"seed": complete.seed}))

    def _defaults(self, name: RunName) -> dict[str, Any]:
        """Return the task's defaults for a name with this family and comparison method."""
        optimizer = name.defaults.optimizer
        return {
            "lr": self.lr.get(optimizer),
            "weight_decay": self.weight_decay.get(optimizer, 0.0) if name.decays else None,
            "warmup": self.warmup,
            "steps": self.steps,
            "seed": self.seeds[0],
        }
