"""Explanation of a trainer's name, from an instance of the trainer with a small network."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn

from nnunet_cpr import fused
from nnunet_cpr._spelling import print_number
from nnunet_cpr.bounds import KappaIP
from nnunet_cpr.cpr import CPRSettings
from nnunet_cpr.names import WarmStartShare, WrongName
from nnunet_cpr.names.trainer_name import FAMILIES, TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.composition import (
    TakenName,
    resolve_settings,
    search_trainer,
    with_cpr,
)
from nnunet_cpr.nnunet.cpr_trainer import CPRTrainer
from nnunet_cpr.nnunet.trainer import trainer_class

_PLANS: dict[str, Any] = {
    "dataset_name": "Dataset000_None",
    "plans_name": "nnUNetPlans",
    "label_manager": "LabelManager",
    "configurations": {
        "3d_fullres": {
            "data_identifier": "nnUNetPlans_3d_fullres",
            "batch_size": 2,
            "patch_size": [64, 64, 64],
            "architecture": {"arch_kwargs": {}},
        }
    },
    "continue_training": False,
}
_DATASET = {"labels": {"background": 0, "foreground": 1}, "channel_names": {"0": "MRI"}}
_NOT_SHOWN = {
    *("params", "param_names", "lr", "initial_lr", "weight_decay"),  # shown elsewhere
    *("foreach", "fused", "capturable", "differentiable", "maximize"),
    *CPRSettings.KEYS,
}


def explain(name: str) -> list[tuple[str, str]]:
    """Return what a trainer does, as pairs of a subject and its description.

    Args:
        name: class name of a trainer, of this package or another one that nnU-Net finds.

    Raises:
        WrongName: there is no such trainer, or it cannot be built without its data.
    """
    settings, wrong = None, None
    try:
        settings = resolve_settings(name)
    except TakenName:
        raise
    except WrongName as error:  # or a trainer of another package whose name resembles ours
        wrong = error
    if settings is None:
        try:
            other = search_trainer(name)
        except WrongName as missing:
            raise wrong or missing from None
        if not issubclass(other, NamedTrainer):
            return [("trainer", f"{name} is not from nnunet-cpr"), ("with CPR", _with_cpr(other))]
        settings, trainer = other.settings, other
    else:
        found = trainer_class(name)
        assert found is not None
        trainer = found
    built, rates = _build(trainer)
    return [
        ("family", f"{settings.family}: {(trainer.__doc__ or settings.defaults.title).splitlines()[0]}"),
        *([("like", _like(settings, trainer.other_trainer()))] if settings.on else []),
        ("optimizer", _optimizer(built.optimizer)),
        ("learning rate", _schedule(built, rates)),
        ("length", _length(built)),
        ("weight decay", _weight_decay(built)),
        *_regularization(built),
        ("compare with", _comparison(settings)),
    ]


def _with_cpr(other: type[nnUNetTrainer]) -> str:
    try:
        return str(with_cpr(other))
    except WrongName:
        return "not by name, as its own begins like one of nnunet-cpr; rename it"


def _like(settings: TrainerName, other: type[nnUNetTrainer]) -> str:
    kept = "optimizer and schedule too" if settings.keeps_optimizer else "except for the optimizer"
    return f"{other.__name__} ({other.__module__}), {kept}"


def _build(trainer: type[NamedTrainer]) -> tuple[NamedTrainer, list[float]]:
    """Build a trainer and its optimizer with a small network, in a temporary folder.

    Returns:
        The trainer, and the learning rate at the start of every epoch.

    Raises:
        WrongName: this fails, as the trainer needs more of its plans.
    """
    variables = ("nnUNet_results", "nnUNet_wandb_enabled", fused.SWITCH)
    before = {variable: os.environ.pop(variable, None) for variable in variables}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.environ["nnUNet_results"] = folder
        os.environ[fused.SWITCH] = "0"  # without steps, importing Numba would be in vain
        try:
            built = trainer(_copy(_PLANS), "3d_fullres", 0, _copy(_DATASET), torch.device("cpu"))
            built.network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.InstanceNorm3d(2, affine=True))
            built.optimizer, built.lr_scheduler = built.configure_optimizers()
            return built, _learning_rates(built)
        except Exception as error:  # the trainer of another package can fail in any way
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise WrongName(f"{trainer.__name__} cannot be built without its data: {reason}") from error
        finally:
            del os.environ["nnUNet_results"], os.environ[fused.SWITCH]
            os.environ.update({key: value for key, value in before.items() if value is not None})


def _copy(plans: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in plans.items()}


def _learning_rates(trainer: NamedTrainer) -> list[float]:
    """Return the learning rate at the start of every epoch."""
    rates = []
    for epoch in range(trainer.num_epochs):
        trainer.current_epoch = epoch
        trainer.on_train_epoch_start()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    return rates


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    shown = {
        key: value
        for key, value in group.items()
        if key not in _NOT_SHOWN and isinstance(value, int | float | tuple)
    }
    return f"{type(optimizer).__name__}({', '.join(f'{key}={value}' for key, value in shown.items())})"


def _schedule(trainer: NamedTrainer, rates: list[float]) -> str:
    highest = rates.index(max(rates))
    epochs = sorted({0, highest, len(rates) // 2, len(rates) - 1})
    points = ", ".join(f"{rates[epoch]:.3g} (epoch {epoch})" for epoch in epochs)
    warmup = trainer.warmup_steps
    before = f"linear warm-up over {warmup:,} steps, then " if warmup else ""
    return f"{before}{type(trainer.lr_scheduler).__name__}: {points}"


def _length(trainer: NamedTrainer) -> str:
    epochs, iterations = trainer.num_epochs, trainer.num_iterations_per_epoch
    return f"{epochs:,} epochs of {iterations:,} iterations, {trainer.total_steps:,} steps"


def _weight_decay(trainer: NamedTrainer) -> str:
    matrices, *others = (group.get("weight_decay", 0) for group in trainer.optimizer.param_groups)
    if isinstance(trainer, CPRTrainer):
        rest = others[0] if others else matrices
        return f"none for regularized parameters, {rest:g} for biases and normalization weights"
    if trainer.baseline is not None and not trainer.settings.decays:
        return f"none, replaced by {trainer.baseline.title}"
    if trainer.baseline is not None:
        return f"{trainer.baseline_decay:g}, applied by {trainer.baseline.title}"
    return f"{matrices:g} for all parameters"


def _regularization(trainer: NamedTrainer) -> Iterator[tuple[str, str]]:
    if not isinstance(trainer, CPRTrainer):
        return
    cpr = trainer.cpr
    adaptive = ", adaptive bounds" if cpr.adaptive else ""
    yield (
        "regularized",
        f"{trainer.cpr_settings['regularizer']} of each weight of convolutional and linear layers (not "
        f"of biases and normalization weights) with CPR, mu = {cpr.mu:g}{adaptive}",
    )
    yield "bound", _bound(trainer)
    if isinstance(cpr.bound, KappaIP) and "SGD" in type(trainer.optimizer).__name__:
        yield "warning", "Kappa-IP did not work with SGD in the paper; use nnUNetTrainerAdamCPR"


def _bound(trainer: CPRTrainer) -> str:
    bound, steps, share = trainer.cpr.bound, trainer.total_steps, trainer.settings.kappa
    word = f"{bound}"
    if isinstance(share, WarmStartShare):
        word = f"ws{print_number(share.percent)}p, here {bound}"
    when = f"at step {bound.earliest:,}, after {bound.earliest / steps:.1%} of the training"
    if bound.earliest >= steps:
        when = f"never: the training ends before step {bound.earliest:,}, choose a smaller number"
    elif isinstance(bound, KappaIP):
        when = when.replace("at step", "at the inflection point, not before step")
    elif bound.earliest == 0:
        when = "before the first step"
    return f"_{word}: {bound.title}; set {when}"


def _comparison(settings: TrainerName) -> str:
    """Return the name of the training that a study compares this one with."""
    other = _counterpart(settings)
    cleared: dict[str, Any]
    if settings.defaults.cpr:
        cleared = {"kappa": None, "regularizer": None, "mu": None, "adaptive": False}
    else:
        cleared = {"weight_decay": None, "baseline": None}
    return str(dataclasses.replace(settings, family=other, **cleared))


def _counterpart(settings: TrainerName) -> str:
    family = settings.defaults
    optimizer = "adam" if family.optimizer == "amos" else family.optimizer
    return next(
        name
        for name, other in FAMILIES.items()
        if other.optimizer == optimizer and other.cpr is not family.cpr
    )
