"""Explanation of a trainer's name, from an instance of the trainer with a small network."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import tempfile
import warnings
from typing import Any

import torch
from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import Tensor, nn

from nnunet_cpr.environment import changed_environment
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.settings_and_defaults import FAMILIES, TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import find_trainer, name_with_cpr
from nnunet_cpr.nnunet.cpr_trainer import CPRTrainer
from nnunet_cpr.optimizers import fused_step


def network_shapes(
    trainer: str, plans: dict[str, Any], dataset: dict[str, Any], configuration: str
) -> dict[str, Tensor] | None:
    """Return the ``state_dict`` of the network that a trainer builds, with random values.

    Args:
        trainer: class name of the trainer.
        plans: content of nnU-Net's plans.
        dataset: content of ``dataset.json``.
        configuration: one of the plans' configurations.

    Returns:
        The weights by name; None if the trainer of another package cannot build its network here.
    """
    build = find_trainer(trainer).build_network_architecture
    manager = PlansManager(plans)
    chosen = manager.get_configuration(configuration)
    described: tuple[Any, ...] = (manager, chosen)
    if "plans_manager" not in inspect.signature(build).parameters:  # nnU-Net's older signature
        described = (
            chosen.network_arch_class_name,
            chosen.network_arch_init_kwargs,
            chosen.network_arch_init_kwargs_req_import,
        )
    channels = determine_num_input_channels(manager, chosen, dataset)
    heads = manager.get_label_manager(dataset).num_segmentation_heads
    try:
        network = build(*described, channels, heads, True)  # with deep supervision
    except Exception:  # it can fail in any way, such as without a GPU; its training checks the weights
        return None
    return dict(network.state_dict())


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
_SHOWN = ("momentum", "nesterov", "betas", "eps", "amsgrad", "ns_steps", "beta", "delta")

NEVER = "which never comes"
"""Words in the description of a bound that is not set before the end of the training."""


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
    settings, other = trainer.settings, trainer.other_trainer()
    built, rates = _build(trainer)
    kept = "optimizer and schedule too" if settings.keeps_optimizer else "except the optimizer"
    length = f"{built.num_epochs:,} epochs of {built.num_iterations_per_epoch:,} iterations"
    decay, word = settings.averaging_decay, settings.pretrained
    rows = [
        ("family", f"{settings.family}: {settings.defaults.title}"),
        ("like", settings.on and f"{other.__name__} ({other.__module__}), {kept}"),
        ("optimizer", _describe_optimizer(built.optimizer)),
        ("learning rate", _describe_schedule(built, rates)),
        ("averaged weights", decay and f"validated and saved: {built.averaging_description(decay)}"),
        ("frozen", settings.freeze and f"the {settings.freeze} keeps its weights"),
        ("begins with", word and f"weights called {word}, by -pretrained_weights CHECKPOINT"),
        ("length", f"{length}, {built._total_steps:,} steps"),
        ("weight decay", _describe_weight_decay(built)),
        *(_describe_cpr(built) if isinstance(built, CPRTrainer) else []),
        ("compare with", _counterpart(settings)),
    ]
    return [(subject, str(text)) for subject, text in rows if text]


def _build(trainer: type[NamedTrainer]) -> tuple[NamedTrainer, list[float]]:
    """Build a trainer and its optimizer with a small network, in a temporary folder.

    Returns:
        The trainer, and the learning rate at the start of every epoch.

    Raises:
        WrongName: this fails, as the trainer needs more of its plans.
    """
    rates = []
    with (
        tempfile.TemporaryDirectory() as folder,
        # Without steps, importing Numba for fused ones would be in vain.
        changed_environment({"nnUNet_results": folder, fused_step.SWITCH: "0"}),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            built = trainer({**_PLANS}, "3d_fullres", 0, {**_DATASET}, torch.device("cpu"))
            built.network = _small_network()
            built.optimizer, built.lr_scheduler = built.configure_optimizers()
            for epoch in range(built.num_epochs):
                built.current_epoch = epoch
                built.on_train_epoch_start()
                rates.append(built.optimizer.param_groups[0]["lr"])
        except Exception as error:  # the trainer of another package can fail in any way
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise WrongName(f"{trainer.__name__} cannot be built without its data: {reason}") from error
    return built, rates


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


def _describe_schedule(trainer: NamedTrainer, rates: list[float]) -> str:
    epochs = sorted({0, rates.index(max(rates)), len(rates) // 2, len(rates) - 1})
    points = ", ".join(f"{rates[epoch]:.3g} (epoch {epoch})" for epoch in epochs)
    warmup = trainer._warmup_steps
    before = f"linear warm-up over {warmup:,} steps, then " if warmup else ""
    return f"{before}{type(trainer.lr_scheduler).__name__}: {points}"


def _describe_weight_decay(trainer: NamedTrainer) -> str:
    decays = [group.get("weight_decay", 0) for group in trainer.optimizer.param_groups]
    if isinstance(trainer, CPRTrainer):
        return f"none for regularized parameters, {decays[-1]:g} for biases and normalization weights"
    if trainer.baseline is None:
        return f"{decays[0]:g} for all parameters"
    title = trainer.baseline.title
    if trainer.settings.decays:
        return f"{trainer.baseline_decay:g}, applied by {title}"
    return f"none, replaced by {title}"


def _describe_cpr(trainer: CPRTrainer) -> list[tuple[str, str]]:
    cpr, bound, regularizer = trainer.cpr, trainer.cpr.bound, trainer.cpr_settings["regularizer"]
    adaptive = ", adaptive bounds" if cpr.adaptive else ""
    when = "set at step" if bound.is_set_once else "not before step"
    steps, word = trainer._total_steps, trainer.settings.tokens().get("kappa", bound)
    part = f"after {bound.earliest / steps:.1%} of the training"
    if bound.earliest >= steps:
        part = f"{NEVER}, as the training has {steps:,} steps; choose a smaller _ws<N>"
    return [
        ("regularized", f"{regularizer} of each weight matrix with CPR, mu = {cpr.mu:g}{adaptive}"),
        ("bound", f"_{word}: {bound.title}; {when} {bound.earliest:,}, {part}"),
    ]


def _counterpart(settings: TrainerName) -> str:
    """Return the name of the training that a study compares this one with."""
    family = settings.defaults
    optimizer = family.optimizer.replace("amos", "adam")
    others = (f for f in FAMILIES.values() if f.optimizer == optimizer and f.cpr is not family.cpr)
    cleared: dict[str, Any] = {"weight_decay": None, "baseline": None}
    if family.cpr:
        cleared = {"kappa": None, "regularizer": None, "mu": None, "adaptive": False}
    return str(dataclasses.replace(settings, family=next(others).name, **cleared))
