"""Trainers of nnU-Net with a network of a few weights, without data.

This module also runs with version 0.1.0 of the package, so it imports the package through nnU-Net only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.golden.optimizer_states import STEPS_AFTER, STEPS_BEFORE, wave

CHECKPOINTS = {
    "sgdcpr": "nnUNetTrainerCPR_ws3_10epochs_5iters",
    "adamcpr": "nnUNetTrainerAdamCPR_ws3_lr1en2_warmup4_10epochs_5iters",
    "sgd": "nnUNetTrainerSGD_10epochs_5iters",
    "rescaling": "nnUNetTrainerSGD_rescale1_10epochs_5iters",
    "norm_control": "nnUNetTrainerSGD_normws2_wd1_10epochs_5iters",
    "muoncpr": "nnUNetTrainerMuonCPR_ws3_warmup4_10epochs_5iters",
    "attached": "nnUNetTrainerAttachCPR_k0p03_10epochs_5iters_on_nnUNetTrainerAdam",
}
"""Trainers whose checkpoints are recorded, by the name of the file."""
OLD_CHECKPOINTS = ("sgdcpr", "adamcpr", "sgd", "rescaling")
"""Those that version 0.1.0 has as well."""

_DATASET = {
    "labels": {"background": 0, "foreground": 1},
    "channel_names": {"0": "MRI"},
    "numTraining": 5,
    "file_ending": ".nii.gz",
}
_NETWORK = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 3,
        "features_per_stage": [2, 2, 2],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[1, 1, 3], [1, 3, 1], [1, 1, 1]],
        "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
        "n_conv_per_stage": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1],
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}
_PLANS: dict[str, Any] = {
    "dataset_name": "Dataset999_Golden",
    "plans_name": "nnUNetPlans",
    "original_median_spacing_after_transp": [1, 1, 1],
    "original_median_shape_after_transp": [16, 16, 16],
    "image_reader_writer": "SimpleITKIO",
    "transpose_forward": [0, 1, 2],
    "transpose_backward": [0, 1, 2],
    "experiment_planner_used": "ExperimentPlanner",
    "label_manager": "LabelManager",
    "foreground_intensity_properties_per_channel": {},
    "configurations": {
        "3d_fullres": {
            "data_identifier": "nnUNetPlans_3d_fullres",
            "preprocessor_name": "DefaultPreprocessor",
            "batch_size": 2,
            "patch_size": [16, 16, 16],
            "spacing": [1, 1, 1],
            "normalization_schemes": ["ZScoreNormalization"],
            "use_mask_for_norm": [False],
            "batch_dice": False,
            "architecture": _NETWORK,
        }
    },
}


@contextlib.contextmanager
def nnunet_folders(folder: Path) -> Iterator[None]:
    """Set nnU-Net's variables to subfolders of a folder, with a data set that has no cases."""
    variables = {
        f"nnUNet_{name}": str(folder / f"nnUNet_{name}") for name in ("raw", "preprocessed", "results")
    }
    data = folder / "nnUNet_preprocessed" / _PLANS["dataset_name"] / "nnUNetPlans_3d_fullres"
    data.mkdir(parents=True, exist_ok=True)
    (data / "case.b2nd").touch()  # the kind of files that nnU-Net infers its data loader from
    with mock.patch.dict(os.environ, {**variables, "nnUNet_compile": "f"}):
        yield


@functools.cache  # nnU-Net reads all of its modules
def find_trainer(name: str) -> Any:
    """Return a trainer class as nnU-Net finds it."""
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer  # noqa: F401
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    return recursive_find_trainer_class_by_name(name)


def build_trainer(name: str, continues: bool = False) -> Any:
    """Build a trainer as nnU-Net does, up to ``initialize``."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = find_trainer(name)(
            plans={**copy.deepcopy(_PLANS), "continue_training": continues},
            configuration="3d_fullres",
            fold=0,
            dataset_json=copy.deepcopy(_DATASET),
            device=torch.device("cpu"),
        )
        trainer.initialize()
    return trainer


def set_weights(trainer: Any) -> None:
    """Set fixed weights."""
    with torch.no_grad():
        for j, p in enumerate(trainer.network.parameters()):
            p.copy_(0.3 * wave(p, 1.0 + j))


def take_steps(trainer: Any, first: int, count: int) -> None:
    """Take steps with fixed gradients; the learning rate is that of an epoch of one step each."""
    for step in range(first, first + count):
        trainer.lr_scheduler.step(step)
        set_gradients(trainer, step)
        trainer.optimizer.step()


def take_steps_at(trainer: Any, epoch: int, count: int = 4) -> list[float]:
    """Take steps at the learning rate of an epoch; return how far each matrix and the vectors move."""
    before = [p.detach().clone() for p in trainer.network.parameters()]
    trainer.lr_scheduler.step(epoch)
    for step in range(count):
        set_gradients(trainer, step)
        trainer.optimizer.step()
    moved = [(p - old).norm().item() for p, old in zip(trainer.network.parameters(), before)]
    shapes = [p.ndim for p in before]
    return [m for m, n in zip(moved, shapes) if n > 1] + [
        sum(m for m, n in zip(moved, shapes) if n == 1)
    ]


def set_gradients(trainer: Any, step: int) -> None:
    for j, p in enumerate(trainer.network.parameters()):
        growth = 0.3 * wave(p, 1.0 + j)
        p.grad = 0.2 * wave(p, 0.7 * (step + 1) + j) - 1.5 * growth / (step + 1)


def write_checkpoint(name: str, file: Path) -> None:
    """Train a few steps and let the trainer save its checkpoint."""
    trainer = build_trainer(name)
    set_weights(trainer)
    take_steps(trainer, 0, STEPS_BEFORE)
    trainer.current_epoch = STEPS_BEFORE - 1  # nnU-Net stores the next epoch
    for epoch in range(STEPS_BEFORE):
        for key in ("mean_fg_dice", "train_losses", "val_losses", "lrs"):
            trainer.logger.log(key, 0.5, epoch)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.save_checkpoint(str(file))


def continue_checkpoint(name: str, file: Path) -> dict[str, Any]:
    """Let a trainer load a checkpoint; return its epoch, and its values after some steps."""
    trainer = build_trainer(name, continues=True)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.load_checkpoint(str(file))
    epoch = trainer.current_epoch
    take_steps(trainer, epoch, STEPS_AFTER)
    state = trainer.optimizer.state_dict().get("cpr", {"state": {}})["state"]
    return {
        "epoch": epoch,
        **{name: p.detach().clone() for name, p in trainer.network.named_parameters()},
        **{key: state[key] for key in ("kappa", "lagrange_multiplier") if key in state},
    }


def checkpoint_layout(file: Path) -> dict[str, Any]:
    """Return the top-level keys of a checkpoint, and the layout of its optimizer's state dict."""
    from tests.golden.optimizer_states import layout

    checkpoint = torch.load(file, weights_only=False)
    groups = checkpoint["optimizer_state"]["param_groups"]
    return {
        "keys": sorted(checkpoint),
        "trainer_name": checkpoint["trainer_name"],
        "optimizer_state": sorted(checkpoint["optimizer_state"]),
        **{key: layout(checkpoint["optimizer_state"].get(key)) for key in ("cpr", "baseline")},
        "groups": [[len(group["params"]), group["lr"], group["weight_decay"]] for group in groups],
    }


def as_json(value: Any) -> Any:
    """Return a value as it is after writing and reading JSON."""
    return json.loads(json.dumps(value))
