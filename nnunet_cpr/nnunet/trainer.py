"""The trainers: nnU-Net's own training with another optimizer, and a record of what CPR did.

A family is a class of a few lines that says only what differs. The class that nnU-Net asks for,
suffixes and all, is made from its family by :func:`trainer_class`.
"""

from __future__ import annotations

import functools
import random
from typing import Any, ClassVar

import numpy as np
import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch.optim import Optimizer

from nnunet_cpr.baselines import amos
from nnunet_cpr.cpr import CPR
from nnunet_cpr.nnunet.history import CSV_NAME, FIGURE_NAME, History
from nnunet_cpr.nnunet.names import TrainerName, parse
from nnunet_cpr.nnunet.schedule import WarmupPolyLRScheduler
from nnunet_cpr.optim import SGDCPR, AdamCPR


class NamedTrainer(nnUNetTrainer):
    """nnU-Net's trainer with the optimizer and the settings that its name says.

    Without a warm-up the learning rate is nnU-Net's own, set every epoch; with one it is the paper's,
    set every iteration.
    """

    settings: ClassVar[TrainerName]

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        super().__init__(plans, configuration, fold, dataset_json, device)
        settings = self.settings
        self.initial_lr = settings.lr or settings.defaults.lr
        if settings.weight_decay is not None:
            self.weight_decay = settings.weight_decay
        self.baseline_decay = self.weight_decay
        if settings.defaults.cpr or settings.baseline is not None:
            self.weight_decay = 0.0  # what nnU-Net gives its optimizer
        if settings.epochs is not None:
            self.num_epochs = settings.epochs
        if settings.iterations is not None:
            self.num_iterations_per_epoch = settings.iterations
        self.warmup_steps = settings.warmup_steps

    def build_optimizer(self) -> Optimizer:
        """The optimizer over ``self.network``."""
        raise NotImplementedError

    def configure_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer = self.build_optimizer()
        self.baseline = self.settings.build_baseline(self.network, self.baseline_decay)
        if self.baseline is not None:
            self.baseline.attach(optimizer)
        if self.warmup_steps == 0:
            return optimizer, PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)
        return optimizer, WarmupPolyLRScheduler(
            optimizer,
            self.initial_lr,
            self.warmup_steps,
            self.num_epochs,
            self.num_iterations_per_epoch,
        )

    def initialize(self) -> None:
        self._seed(0)  # the network's initial weights
        super().initialize()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.baseline is not None:
            self.print_to_log_file(f"Regularizing with {self.baseline!r}")

    def on_train_epoch_start(self) -> None:
        # From the epoch's number, so that a resumed training draws what an uninterrupted one does.
        self._seed(1 + self.current_epoch)
        super().on_train_epoch_start()

    def train_step(self, batch: dict) -> dict:
        if isinstance(self.lr_scheduler, WarmupPolyLRScheduler):
            self.lr_scheduler.step_iteration()
        return super().train_step(batch)

    def _seed(self, stream: int) -> None:
        if self.settings.seed is None:
            return
        words = np.random.SeedSequence([self.settings.seed, self.local_rank, stream])
        seed = int(words.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


class _CPRTrainer(NamedTrainer):
    """What the trainers with CPR add: the regularizer's settings and the record of its work."""

    optimizer: SGDCPR | AdamCPR
    history: History | None = None  # on the first rank, from on_train_start on

    @property
    def cpr(self) -> CPR:
        return self.optimizer.cpr

    def on_train_start(self) -> None:
        super().on_train_start()
        _prepare_logger(self.logger, self.current_epoch)
        if self.local_rank == 0:
            self.history = History.resume(self.output_folder, self.current_epoch, self.cpr.names)
            if self.history.set_aside is not None:
                self.print_to_log_file(
                    f"{CSV_NAME} could not be read; it is {self.history.set_aside.name} now"
                )
        self.print_to_log_file(f"Regularizing with {self.cpr!r}")
        self.print_to_log_file("Regularized:", ", ".join(self.cpr.names))
        steps = self.num_epochs * self.num_iterations_per_epoch
        if self.cpr.bound.earliest >= steps:
            self.print_to_log_file(
                f"WARNING! No bound is set before step {self.cpr.bound.earliest} and this training has "
                f"{steps} steps: nothing will be regularized. Name a trainer with a smaller "
                f"_{self.cpr.bound.keyword}<N>."
            )

    def on_train_epoch_end(self, train_outputs: list[dict]) -> None:
        super().on_train_epoch_end(train_outputs)
        metrics = self.cpr.metrics()
        for key in LOGGED:
            self.logger.log(f"cpr_{key}", metrics[key], self.current_epoch)
        self.print_to_log_file(
            "CPR: step {step}, measure/bound {measure_to_kappa:.4f}, multiplier mean "
            "{lagrange_multiplier_mean:.3g} max {lagrange_multiplier_max:.3g}, bounds set "
            "{bounded:.0%}, multipliers above 0 {active:.0%}, updates left out {skipped_updates:.0f}, "
            "corrections at their limit {limited_corrections:.0f}".format(
                step=self.cpr.step_count, **metrics
            )
        )
        if self.history is not None:
            self.history.append(self.current_epoch, self.cpr)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.history is not None:
            try:
                self.history.draw()
            except OSError as error:  # a full disk costs the picture, not the training
                self.print_to_log_file(f"Could not write {FIGURE_NAME}: {error}")


LOGGED = ("measure_to_kappa", "lagrange_multiplier_mean", "lagrange_multiplier_max", "active")
"""The epoch means that go into nnU-Net's logger, and from it to W&B, as ``cpr_<name>``."""


def _prepare_logger(logger: Any, epochs_done: int) -> None:
    """nnU-Net's logger takes only keys it has, with one value for every epoch so far."""
    values = logger.local_logger.my_fantastic_logging
    for key in LOGGED:
        logged = values.setdefault(f"cpr_{key}", [])
        logged += [float("nan")] * (epochs_done - len(logged))


class nnUNetTrainerCPR(_CPRTrainer):
    """nnU-Net's SGD with CPR in place of weight decay."""

    settings = TrainerName("nnUNetTrainerCPR")

    def build_optimizer(self) -> Optimizer:
        return SGDCPR(
            self.network,
            self.initial_lr,
            momentum=0.99,
            **self.settings.cpr_settings,
        )


class nnUNetTrainerAdamCPR(_CPRTrainer):
    """Adam with CPR, as in the paper's BTCV, Heart and BraTS runs."""

    settings = TrainerName("nnUNetTrainerAdamCPR")

    def build_optimizer(self) -> Optimizer:
        return AdamCPR(
            self.network,
            self.initial_lr,
            betas=ADAM_BETAS,
            **self.settings.cpr_settings,
        )


class nnUNetTrainerSGD(NamedTrainer):
    """nnU-Net's own SGD and weight decay, with suffixes."""

    settings = TrainerName("nnUNetTrainerSGD")

    def build_optimizer(self) -> Optimizer:
        return nnUNetTrainer.configure_optimizers(self)[0]


class nnUNetTrainerAdamW(NamedTrainer):
    """Adam with decoupled weight decay: what ``nnUNetTrainerAdamCPR`` is compared with."""

    settings = TrainerName("nnUNetTrainerAdamW")

    def build_optimizer(self) -> Optimizer:
        return torch.optim.AdamW(
            self.network.parameters(),
            self.initial_lr,
            betas=ADAM_BETAS,
            weight_decay=self.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )


class nnUNetTrainerAMOS(NamedTrainer):
    """AMOS, whose decay adapts to the model; a weight decay in the name comes on top."""

    settings = TrainerName("nnUNetTrainerAMOS")

    def build_optimizer(self) -> Optimizer:
        return amos(self.network, self.initial_lr, self.settings.weight_decay or 0.0)


ADAM_BETAS = (0.9, 0.99)

_FAMILIES = (
    nnUNetTrainerCPR,
    nnUNetTrainerAdamCPR,
    nnUNetTrainerSGD,
    nnUNetTrainerAdamW,
    nnUNetTrainerAMOS,
)


@functools.cache
def trainer_class(name: str) -> type[NamedTrainer] | None:
    """The trainer of that name, or None where the name is not one of ours, nor meant to be.

    Raises:
        WrongName: the name is almost one of ours.
    """
    settings = parse(name)
    if settings is None:
        return None
    family = {cls.__name__: cls for cls in _FAMILIES}[settings.family]
    # nnU-Net stores the class's name in checkpoints and looks it up again as it was typed.
    return type(name, (family,), {"settings": settings, "__doc__": family.__doc__})
