"""Trainers that people derive from those of this package, or combine with them, as source text."""

from __future__ import annotations

CLASSES = '''
import os
from os.path import join

import numpy as np
import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.trainer import nnUNetTrainerAdamCPR, nnUNetTrainerCPR, nnUNetTrainerSGD
from tests.golden.tiny_trainer import set_gradients


class Loads:
    """Loads weights of its own, such as self-supervised ones."""

    def on_train_start(self):
        super().on_train_start()
        with torch.no_grad():
            for p in self.network.parameters():
                p.fill_(0.5)


class Resets:
    """Resets weights in an epoch."""

    def on_epoch_start(self):
        super().on_epoch_start()
        if self.current_epoch == 1:
            with torch.no_grad():
                for p in self.network.parameters():
                    p.fill_(0.25)


class Saves:
    """Saves when the training part of an epoch has ended."""

    def on_train_epoch_end(self, outputs):
        super().on_train_epoch_end(outputs)
        self.save_checkpoint(join(self.output_folder, "checkpoint_latest.pth"))


class Copies:
    """Nearly all methods of nnU-Net copied and changed, without super()."""

    def on_train_start(self):
        self.do_split()

    def on_epoch_start(self):
        self.logger.log("epoch_start_timestamps", 0.0, self.current_epoch)

    def on_train_epoch_start(self):
        self.number = 0
        self.network.train()
        self.lr_scheduler.step(self.current_epoch)
        self.logger.log("lrs", self.optimizer.param_groups[0]["lr"], self.current_epoch)

    def train_step(self, batch):
        """Accumulates gradients over two iterations."""
        set_gradients(self, self.number)
        if self.number % 2:
            self.optimizer.step()
        self.number += 1
        return {"loss": np.float32(0.5)}

    def on_train_epoch_end(self, outputs):
        pass

    def on_validation_epoch_start(self):
        self.network.eval()

    def validation_step(self, batch):
        return {"weights": [p.detach().clone() for p in self.network.parameters()]}

    def on_validation_epoch_end(self, outputs):
        pass

    def on_epoch_end(self):
        self.current_epoch += 1
        self.save_checkpoint(join(self.output_folder, "checkpoint_latest.pth"))

    def save_checkpoint(self, filename):
        """Save the weights alone."""
        torch.save({"network_weights": self.network.state_dict()}, filename)


class Centered(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


class Stages:
    """Builds the optimizer anew in a later epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizer, self.lr_scheduler = self.configure_optimizers()
        super().on_train_epoch_start()


class Side:
    """Writes and reads a second file, with objects in it."""

    def save_checkpoint(self, filename):
        super().save_checkpoint(filename)
        torch.save({"folder": torch.nn.Linear(1, 1)}, str(filename) + ".side")

    def load_checkpoint(self, filename):
        super().load_checkpoint(filename)
        self.side = torch.load(str(filename) + ".side", weights_only=False)


class Averages:
    """A mean teacher of its own, which validates."""

    def initialize(self):
        super().initialize()
        import copy

        self.teacher = copy.deepcopy(self.network)

    def train_step(self, batch):
        result = super().train_step(batch)
        with torch.no_grad():
            for mean, p in zip(self.teacher.parameters(), self.network.parameters()):
                mean.lerp_(p, 0.1)
        return result


class Second:
    """A second optimizer beside nnU-Net's."""

    def initialize(self):
        super().initialize()
        self.center = torch.nn.Parameter(torch.zeros(1))
        self.second = torch.optim.SGD([self.center], lr=0.1)

    def train_step(self, batch):
        self.center.grad = torch.ones(1)
        self.second.step()
        return super().train_step(batch)


class Answers:
    """Methods with further arguments, and results that a loop of its own uses."""

    def on_epoch_end(self):
        super().on_epoch_end()
        return self.current_epoch < 2

    def perform_actual_validation(self, *arguments):
        return {"Dice": 1}

    def save_checkpoint(self, filename, note=None):
        super().save_checkpoint(filename)
        return note

    def load_checkpoint(self, filename, strict=True):
        super().load_checkpoint(filename)
        return strict


class OwnLoop:
    """A training loop that leaves nnU-Net's methods out."""

    def run_training(self):
        for _ in range(2):
            for number in range(12):
                self.steps_of_test = number
                self.train_step({})
            self.current_epoch += 1
        self.current_epoch -= 1
        self.save_checkpoint(join(self.output_folder, "checkpoint_final.pth"))


class Fails:
    """A validation that fails, in a loop that may go on."""

    def validation_step(self, batch):
        raise ValueError("no memory")


class GoesBack:
    """Goes back to an earlier checkpoint at the end of a validation."""

    def on_validation_epoch_end(self, outputs):
        super().on_validation_epoch_end(outputs)
        if self.current_epoch == 2:
            self.load_checkpoint(join(self.output_folder, "checkpoint_kept.pth"))


class SetsMethods:
    """Sets a method on the trainer itself."""

    def initialize(self):
        super().initialize()
        self.train_step = self.my_step

    def my_step(self, batch):
        self.is_mine = True
        return type(self).train_step(self, batch)


class nnUNetTrainerInitializes(nnUNetTrainer):
    def __init__(self, plans, configuration, fold, dataset_json, device=torch.device("cpu")):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.initialize()

    def initialize(self):
        if not self.was_initialized:
            super().initialize()
'''
KINDS = ("Loads", "Resets", "Saves", "Copies", "Stages", "Side", "Averages", "Second")
OTHERS = ("Answers", "OwnLoop", "Fails", "GoesBack", "SetsMethods")
DERIVED = "\n".join(
    f"\n\nclass nnUNetTrainer{kind}{short}({kind}, nnUNetTrainer{family}):\n    pass"
    for kind in (*KINDS, *OTHERS)
    for short, family in (("ofSGD", "SGD"), ("ofCPR", "CPR"), ("ofAdam", "AdamCPR"), ("Alone", ""))
)
CENTERED = """


class nnUNetTrainerCentered(nnUNetTrainer):
    def configure_optimizers(self):
        optimizer = Centered(self.network.parameters(), self.initial_lr)
        return optimizer, PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)
"""
DERIVED_TRAINERS = CLASSES + DERIVED + CENTERED
"""Classes of each kind: derived from three families, and as a trainer of their own."""
