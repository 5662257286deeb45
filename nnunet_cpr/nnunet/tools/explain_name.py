"""Explanation of a trainer's name, from an instance of the trainer with a small network."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nnunet_cpr.environment import changed_environment
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.names.training import Training
from nnunet_cpr.nnunet.base_trainer import NamedTrainer, other_trainer, parts_of
from nnunet_cpr.nnunet.classes import find_trainer, name_with_cpr
from nnunet_cpr.optimizers import fused_step
from nnunet_cpr.refusals import Refusal

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
}
_DATASET = {"labels": {"background": 0, "foreground": 1}, "channel_names": {"0": "MRI"}}
_SHOWN = ("momentum", "nesterov", "betas", "eps", "amsgrad", "ns_steps", "beta", "delta")


@functools.cache
def training_of(name: str) -> Training | None:
    """Return all that a trainer's name trains, with the lengths of its class.

    Returns:
        None for a trainer that is not from this package, is not found, or cannot be built without data.
    """
    try:
        trainer = find_trainer(name)
        return build_without_data(trainer).training if issubclass(trainer, NamedTrainer) else None
    except Refusal:
        return None


def explain(name: str) -> list[tuple[str, str]]:
    """Return what a trainer does, as pairs of a subject and its description.

    Args:
        name: class name of a trainer, of this package or another one that nnU-Net finds.

    Raises:
        WrongName: there is no such trainer, or it cannot be built without its data.
    """
    trainer = find_trainer(name)
    if not issubclass(trainer, NamedTrainer):
        return [("trainer", f"{name} is not from nnunet-cpr"), ("with CPR", str(name_with_cpr(trainer)))]
    settings, other = trainer.settings, other_trainer(trainer)
    with _without_traces(trainer):
        built = _configure(_construct(trainer))
        training, rates = parts_of(built).settings.in_force, _describe_rates(built)
    rows = []
    for title, text in training.rows():
        if title == "like":
            text = text.replace(",", f" ({other.__module__}),", 1)
        elif title == "learning rate":
            rows.append(("optimizer", _describe_optimizer(built.optimizer)))
            text += f": {rates}"
        elif title == "bound" and "kappa" in settings.tokens():  # as it is written, perhaps as a share
            text = f"_{settings.tokens()['kappa']}{text[text.index(':') :]}"
        rows.append((title, text))
    return [*rows, ("compare with", _counterpart(settings))]


def build_without_data(
    trainer: type[NamedTrainer],
    plans: dict[str, Any] = _PLANS,
    dataset: dict[str, Any] = _DATASET,
    configuration: str = "3d_fullres",
) -> NamedTrainer:
    """Build a trainer and, where a small network suffices for it, its optimizer.

    Args:
        trainer: its class.
        plans: content of nnU-Net's plans.
        dataset: content of ``dataset.json``.
        configuration: one of the plans' configurations.

    Raises:
        WrongName: this fails, as the trainer needs more of its plans.
    """
    with _without_traces(trainer):
        built = _construct(trainer, plans, dataset, configuration)
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            _configure(built)  # some need parts of their own networks
        return built


def _construct(trainer: type[NamedTrainer], *arguments: Any) -> NamedTrainer:
    plans, dataset, configuration = arguments or (_PLANS, _DATASET, "3d_fullres")
    plans = {**plans, "continue_training": False}  # as nnU-Net's command adds it
    return trainer(plans, configuration, 0, {**dataset}, torch.device("cpu"))


def _configure(built: NamedTrainer) -> NamedTrainer:
    built.network = _small_network()
    built.optimizer, built.lr_scheduler = built.configure_optimizers()
    return built


@contextlib.contextmanager
def _without_traces(trainer: type[NamedTrainer]) -> Iterator[None]:
    """Let a trainer write into a temporary folder, print nothing, and report what fails in one line."""
    with (
        tempfile.TemporaryDirectory() as folder,
        # Without steps, importing Numba for fused ones would be in vain.
        changed_environment({"nnUNet_results": folder, fused_step.SWITCH: "0"}),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        except SystemExit:  # after its line
            lines = said.getvalue().strip().splitlines() or ["ends"]
            raise WrongName(lines[-1].removeprefix("nnunet-cpr: ")) from None
        except Exception as error:  # the trainer of another package can fail in any way
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise WrongName(f"{trainer.__name__} cannot be built without its data: {reason}") from error


def _small_network() -> nn.Module:
    """Return a network with the parts of nnU-Net's, in the order of its parameters."""
    network = nn.Sequential()
    network.encoder = nn.Conv3d(1, 2, 3)
    network.decoder = nn.Sequential(nn.Conv3d(2, 2, 3), nn.InstanceNorm3d(2, affine=True))
    return network


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    shown = ", ".join(f"{key}={group[key]}" for key in _SHOWN if group.get(key) is not None)
    return f"{type(optimizer).__name__}({shown})"


def _describe_rates(trainer: NamedTrainer) -> str:
    """Return the learning rate at the start of some epochs."""
    rates = []
    for epoch in range(trainer.num_epochs):
        trainer.current_epoch = epoch
        trainer.on_train_epoch_start()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    epochs = sorted({0, rates.index(max(rates)), len(rates) // 2, len(rates) - 1})
    points = ", ".join(f"{rates[epoch]:.3g} (epoch {epoch})" for epoch in epochs)
    return f"{type(trainer.lr_scheduler).__name__}, {points}"


def _counterpart(settings: TrainerName) -> str:
    """Return the name of the training that a study compares this one with."""
    family = settings.defaults
    optimizer = family.optimizer.replace("amos", "adam")
    others = (f for f in FAMILIES.values() if f.optimizer == optimizer and f.cpr is not family.cpr)
    cleared: dict[str, Any] = {"weight_decay": None, "baseline": None}
    if family.cpr:
        cleared = {"kappa": None, "regularizer": None, "mu": None, "adaptive": False}
    return str(dataclasses.replace(settings, family=next(others).name, **cleared))
