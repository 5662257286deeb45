"""What a run trains: a model on data, with the settings that its name does not say.

To add a task: write a module in :mod:`nnunet_cpr.vision.tasks` that makes a :class:`Task`, and list it
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

from nnunet_cpr.bounds import KappaWS
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import RunName

Batch = Any
"""What a task's data gives and its loss takes; tensors in lists, tuples and dicts."""


class CannotTrain(RuntimeError):
    """A run that cannot begin or go on; its message, one line, says why."""


class Diverged(CannotTrain):
    """A run whose loss is no number any more."""


class InUse(CannotTrain):
    """A run that another process is training."""


@dataclass(frozen=True)
class Options:
    """What the user says beside the name of the task and of the run.

    Attributes:
        data: the folder of the data set; None for tasks whose data needs no folder.
        device: where to train.
        workers: processes that load data.
        bf16: train in bfloat16 where autocast allows; off is float32.
        microbatches: parts that a batch is split into, one after the other, so that it fits.
        keep_model: leave the trained weights in the run's folder.
        again: train a run anew that is done or has diverged; others go on.
        settings: further settings that a task knows, such as ``model``.
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
class Prepared:
    """A task ready to be trained.

    Attributes:
        model: initialised from torch's generator, on the CPU.
        epoch: the batches of an epoch by its number, on the CPU or where the options say to train.
            Whatever is drawn at random comes from torch's, NumPy's and Python's global generators, which
            are seeded for each epoch, so that a run that was stopped goes on as if it had not been.
        loss: of a batch, a scalar.
        evaluate: the numbers to report, by name; ``loss`` and the task's metric among them. The model is
            in evaluation mode then.
        evaluate_last: further numbers, which take too long for more than once: at the end of training.
    """

    model: nn.Module
    epoch: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    evaluate_last: Callable[[nn.Module], dict[str, float]] | None = None


@dataclass(frozen=True)
class Task:
    """A model, its data, and the paper's settings for them.

    Attributes:
        name: in commands and folders.
        about: one line for the user.
        prepare: loads the data and makes the model.
        steps: optimizer steps.
        warmup: steps of the learning rate's linear warm-up, from 0 or ``first_lr``.
        lr: highest learning rate by the family's optimizer (``adam``, ``sgd``, ``amos``).
        final_lr: the last learning rate of the cosine that follows, as a multiple of the highest.
        first_lr: where the warm-up begins, as a multiple of the highest.
        betas, eps: of Adam. momentum: of SGD, which is Nesterov's.
        weight_decay: by the family's optimizer, where the name does not say it; 0 where this neither.
        clip: largest norm of the gradients, or None.
        metric: what :class:`Prepared` evaluates, in the end at least, that the runs are compared by; the
            larger, the better.
        epochs_between: evaluations and checkpoints, in epochs.
        seeds: of the paper's repetitions.
        settings: the keys of :attr:`Options.settings` that it knows.
        settings_without_effect: those of them that do not change a run.
        data_folders: the folders in :attr:`Options.data` whose files tell one data set from another.
    """

    name: str
    about: str
    prepare: Callable[[Options], Prepared]
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
    epochs_between: int = 1
    seeds: tuple[int, ...] = (1, 2, 3)
    settings: tuple[str, ...] = ()
    settings_without_effect: tuple[str, ...] = ()
    data_folders: tuple[str, ...] = ()

    def check_settings(self, given: Mapping[str, str]) -> None:
        """See that the task knows the settings.

        Raises:
            CannotTrain: one that it does not know.
        """
        unknown = [key for key in given if key not in self.settings]
        if unknown:
            known = f"there are {', '.join(self.settings)}" if self.settings else "it has none"
            raise CannotTrain(f"{self.name} has no setting {unknown[0]!r}; {known}")

    def complete(self, name: RunName) -> RunName:
        """The run with everything said: what its name leaves out is the task's.

        Raises:
            WrongName: the warm-up is not shorter than the training, or there is no learning rate for
                the family.
        """
        own = self._settings(name)
        said = {key: getattr(name, key) for key in own}
        if name.lr is None and own["lr"] is None:
            raise WrongName(f"{self.name} has no learning rate for {name.family}; say it with _lr<V>")
        if name.baseline is not None and name.weight_decay is None and own["weight_decay"] == 0:
            raise WrongName(
                f"{self.name} has no weight decay of its own for {name.family}, so {name} would decay "
                "nothing; say one with _wd<V>"
            )
        return dataclasses.replace(
            name, **{key: own[key] if value is None else value for key, value in said.items()}
        )

    def shorten(self, name: RunName) -> RunName:
        """The same run without what is the task's own anyway; only the seed is always said.

        Raises:
            WrongName: as :meth:`complete`.
        """
        whole = self.complete(name)
        own = self._settings(name)
        own |= {"mu": 1.0, "regularizer": "l2", "kappa": KappaWS(whole.default_warm_start)}
        needless: dict[str, Any] = {key: None for key in own if getattr(whole, key) == own[key]}
        return dataclasses.replace(whole, **(needless | {"seed": whole.seed}))

    def _settings(self, name: RunName) -> dict[str, Any]:
        """What a name with this family and baseline may leave out."""
        optimizer = name.defaults.optimizer
        return {
            "lr": self.lr.get(optimizer),
            "weight_decay": self.weight_decay.get(optimizer, 0.0) if name.decays else None,
            "warmup": self.warmup,
            "steps": self.steps,
            "seed": self.seeds[0],
        }
