"""nnU-Net's own trainers, and trainers in the style of other projects."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import nnunetv2.training.nnUNetTrainer as folder
import pytest
from dynamic_network_architectures.architectures import primus
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.training.nnUNetTrainer.variants.lr_schedule.nnUNetTrainer_warmup import (
    nnUNetTrainer_warmup,
)

from nnunet_cpr.nnunet.parts import progress

OTHER_PROJECTS = '''
"""Trainers in the style of MedNeXt, U-Mamba and others."""

from multiprocessing import get_context

import numpy as np
import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn


class Small(nn.Module):
    """Network without nnU-Net's decoder, whose output is a list with deep supervision."""

    def __init__(self, channels, classes, deep_supervision):
        super().__init__()
        self.first = nn.Conv3d(channels, 8, 3, padding=1)
        self.norm = nn.GroupNorm(8, 8)
        self.second = nn.Conv3d(8, 8, 7, padding=3, groups=8)
        self.out = nn.ModuleList(nn.Conv3d(8, classes, 1) for _ in range(2))
        self.deep_supervision = deep_supervision

    def forward(self, x):
        x = torch.nn.functional.gelu(self.second(self.norm(self.first(x))))
        outputs = [self.out[0](x), self.out[1](torch.nn.functional.avg_pool3d(x, 2))]
        return outputs if self.deep_supervision else outputs[0]


class nnUNetTrainerMedNeXtLike(nnUNetTrainer):
    """AdamW of its own, constant learning rate, other clipping, old forms of nnU-Net's functions."""

    def __init__(
        self, plans, configuration, fold, dataset_json, unpack_dataset=True, device=torch.device("cuda")
    ):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.initial_lr = 1e-3
        self.num_epochs = 3

    @staticmethod
    def build_network_architecture(
        architecture_class_name, arch_init_kwargs, arch_init_kwargs_req_import,
        num_input_channels, num_output_channels, enable_deep_supervision=True,
    ):
        return Small(num_input_channels, num_output_channels, enable_deep_supervision)

    def _get_deep_supervision_scales(self):
        return [[1, 1, 1], [0.5, 0.5, 0.5]] if self.enable_deep_supervision else None

    def set_deep_supervision_enabled(self, enabled):
        network = self.network.module if self.is_ddp else self.network
        network.deep_supervision = enabled

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.network.parameters(), self.initial_lr, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return optimizer, schedule

    def train_step(self, batch):
        output = super().train_step(batch)
        self.steps_taken = getattr(self, "steps_taken", 0) + 1
        return output


class nnUNetTrainerUMambaLike(nnUNetTrainer):
    """Network of its own and nnU-Net's optimizer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.enable_deep_supervision = False
        self.initial_lr = 5e-3

    @staticmethod
    def build_network_architecture(
        plans_manager, configuration_manager, num_input_channels, num_output_channels,
        enable_deep_supervision=True,
    ):
        return Small(num_input_channels, num_output_channels, enable_deep_supervision)

    def set_deep_supervision_enabled(self, enabled):
        self.network.deep_supervision = enabled


class nnUNetTrainerStages(nnUNetTrainer):
    """A second optimizer from epoch 1 on."""

    stage = None

    def configure_optimizers(self, stage="first"):
        self.stage = stage
        optimizer = torch.optim.SGD(
            self.network.parameters(), self.initial_lr, weight_decay=self.weight_decay, momentum=0.9
        )
        return optimizer, PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizer, self.lr_scheduler = self.configure_optimizers("second")
        super().on_train_epoch_start()


class nnUNetTrainerFixedRate(nnUNetTrainer):
    """A learning rate that is not ``initial_lr``."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.network.parameters(), 0.1)
        return optimizer, PolyLRScheduler(optimizer, 0.1, self.num_epochs)


class nnUNetTrainerLate(nnUNetTrainer):
    """An optimizer that is not from configure_optimizers."""

    def initialize(self):
        super().initialize()
        self.optimizer = torch.optim.AdamW(self.network.parameters(), 1e-3)


class nnUNetTrainerShort(nnUNetTrainer):
    """A length that is set when the training starts."""

    def on_train_start(self):
        super().on_train_start()
        self.num_epochs = 5


class nnUNetTrainerPart(nnUNetTrainer):
    """An optimizer of the first parameter only."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([next(self.network.parameters())], self.initial_lr)
        return optimizer, PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)


class nnUNetTrainerLists(nnUNetTrainer):
    """Lists, as Lightning takes them."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.network.parameters(), self.initial_lr)
        return [optimizer], [PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)]


class nnUNetTrainerAlone(nnUNetTrainerLists):
    """No schedule."""

    def configure_optimizers(self):
        return super().configure_optimizers()[0][0]


class nnUNetTrainerBeside(nnUNetTrainer):
    """A file beside each checkpoint."""

    def save_checkpoint(self, filename):
        super().save_checkpoint(filename)
        torch.save({"epoch": self.current_epoch}, filename.replace(".pth", "_ema.pth"))


class nnUNetTrainerLayers(nnUNetTrainer):
    """A learning rate for each layer, as in fine-tuning."""

    def configure_optimizers(self):
        groups = [
            {"params": [p], "lr": self.initial_lr * 0.5**depth}
            for depth, p in enumerate(reversed(list(self.network.parameters())))
        ]
        optimizer = torch.optim.AdamW(groups, self.initial_lr, weight_decay=self.weight_decay)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.num_epochs)


class nnUNetTrainerCycle(nnUNetTrainer):
    """A schedule of its own for each iteration."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.network.parameters(), self.initial_lr, momentum=0.9, weight_decay=self.weight_decay
        )
        steps = self.num_epochs * self.num_iterations_per_epoch
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.initial_lr, steps)
        return optimizer, schedule

    def on_train_epoch_start(self):
        self.network.train()

    def train_step(self, batch):
        loss = super().train_step(batch)
        self.lr_scheduler.step()
        return loss
'''


def trainers_of_nnunet() -> dict[str, type[nnUNetTrainer]]:
    """Return all trainer classes in nnU-Net's own folders, by name."""
    found = {}
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if (
                inspect.isclass(value)
                and issubclass(value, nnUNetTrainer)
                and value is not nnUNetTrainer
            ):
                found[name] = value
    return dict(sorted(found.items()))


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Shorten what does not matter in these tests: transformers, warm-up, figures, validation."""
    build = primus.Primus.__init__
    signature = inspect.signature(build)
    small = {"embed_dim": 36, "eva_depth": 2, "eva_numheads": 1}

    def build_small(network: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(network, *args, **kwargs)
        if type(network) is primus.Primus:
            given.arguments.update(small)
        build(*given.args, **given.kwargs)

    patch.setattr(primus.Primus, "__init__", build_small)
    begin = nnUNetTrainer_warmup.__init__

    def begin_short(trainer: Any, *args: Any, **kwargs: Any) -> None:
        begin(trainer, *args, **kwargs)
        trainer.warmup_duration_whole_net = 1

    patch.setattr(nnUNetTrainer_warmup, "__init__", begin_short)
    for size in primus._PRIMUS_CONFIGS.values():
        for key, value in small.items():
            patch.setitem(size, key, value)
    patch.setattr(progress, "draw_progress", lambda history: None)
    patch.setattr(nnUNetTrainer, "perform_actual_validation", lambda self, save_probabilities: None)


NNUNET = trainers_of_nnunet()
NOT_TO_COMBINE = {"AbstractPrimus"} | {name for name in NNUNET if name.startswith("_")}


def name_on(other: str, settings: str = "") -> str:
    """Return the name of the trainer with CPR that is like another one."""
    family = "nnUNetTrainerCPR"
    if NNUNET[other].configure_optimizers is not nnUNetTrainer.configure_optimizers:
        family = "nnUNetTrainerAttachCPR"
    return f"{family}{settings}_on_{other}"
