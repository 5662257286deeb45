"""Pretrained weights: their record in checkpoints, and nnU-Net's trainer that keeps it."""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from nnunetv2.run.load_pretrained_weights import load_pretrained_weights
from torch import Tensor, nn

from nnunet_cpr.nnunet.averaged_weights import AveragingTrainer
from nnunet_cpr.nnunet.fold_files import PRETRAINED
from nnunet_cpr.refusals import one_line

_NOT_LOADED = ".seg_layers."
"""Part of the names of weights that nnU-Net does not load, those of the segmentation heads."""


def given_weights(arguments: Sequence[str] | None = None) -> Path | None:
    """Return the file of ``-pretrained_weights`` in nnU-Net's command, None without it.

    It is checked before nnU-Net loads it, so that a mistake costs a line.

    Args:
        arguments: arguments of the command; None for those of this process.

    Example:
        >>> given_weights(["4", "3d_fullres", "0", "-p", "nnUNetPlans"]) is None
        True
        >>> given_weights(["4", "2d", "0", "-pretrained_weights", "/tmp/final.pth"]).name
        'final.pth'
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-pretrained_weights", nargs="?")
    parser.add_argument("-p", nargs="?")  # otherwise an abbreviation
    known, _ = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    return None if known.pretrained_weights is None else Path(known.pretrained_weights).absolute()


@functools.cache
def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as ``sha256sum`` prints it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def record_loaded_weights(network: nn.Module, record: dict[str, Any]) -> None:
    """Record path and SHA-256 of the pretrained weights that nnU-Net loads into a network.

    Its function is given the network and the file, by its command or by a script, and tells nobody.

    Args:
        network: the network, without wrappers.
        record: dictionary to which the entry is added.
    """

    def record_file(*_: Any) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is load_pretrained_weights.__code__:
                path = Path(frame.f_locals["fname"]).absolute()
                record[PRETRAINED] = {"path": str(path), "sha256": sha256(path)}
                return
            frame = frame.f_back

    # A function, which copies of the network share, in place of a method, whose object they would copy.
    network.register_load_state_dict_post_hook(record_file)


def misfit(network: Mapping[str, Tensor], weights: Mapping[str, Any]) -> str | None:
    """Return why pretrained weights do not fit a network by nnU-Net's rule, None if they do.

    Args:
        network: the network's ``state_dict``; its values are not read.
        weights: ``network_weights`` of a checkpoint. Segmentation heads may differ or be missing.

    Example:
        >>> misfit({"a": torch.ones(2), "x.seg_layers.0": torch.ones(1)}, {"a": torch.ones(3)})
        'a: expected shape (2,), got (3,)'
    """
    for name, value in network.items():
        if _NOT_LOADED in name:
            continue
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != value.shape:
            return f"{name}: expected shape {tuple(value.shape)}, got {tuple(weights[name].shape)}"
    return None


class PretrainedWeightsTrainer(AveragingTrainer):
    """nnU-Net's trainer that records the pretrained weights with which its training began.

    nnU-Net has one folder for a trainer, whatever the training began with. The suffix ``_pre<Word>``
    gives fine-tuned trainings a folder of their own, and begins only with pretrained weights.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.__given = given_weights()
        if self.__given is None:
            return
        if self.continues:
            self._exit(
                "--c continues with the weights of the checkpoint; leave -pretrained_weights out, or "
                "leave --c out to begin anew"
            )
        if not self.__given.is_file():
            self._exit(f"-pretrained_weights: expected a checkpoint, got no file {self.__given}")

    def initialize(self) -> None:
        super().initialize()
        record_loaded_weights(self.unwrapped_network, self.my_init_kwargs)
        if self.__given is None:
            return
        try:  # as nnU-Net, which loads whatever the file has
            weights = torch.load(self.__given, map_location="cpu", weights_only=False)["network_weights"]
        except Exception as error:  # a damaged file can fail in any way
            text = f"{type(error).__name__}: {one_line(error)}"
            self._exit(f"{self.__given} cannot be read as a checkpoint of nnU-Net: {text}")
        if reason := misfit(self.unwrapped_network.state_dict(), weights):
            self._exit(
                f"{self.__given} does not fit the network of {self.plans_manager.plans_name}, "
                f"{self.configuration_name}: {reason}; fine-tune with the plans of the weights"
            )

    def run_training(self) -> None:
        word, record = self.settings.pretrained, self.my_init_kwargs.get(PRETRAINED)
        if word is not None and record is None:
            self._exit(
                f"{type(self).__name__}: expected pretrained weights, as _pre{word} says, got none; "
                "give -pretrained_weights CHECKPOINT, without --c"
            )
        super().run_training()

    def on_train_start(self) -> None:
        super().on_train_start()
        if record := self.my_init_kwargs.get(PRETRAINED):
            self.print_to_log_file(
                f"Began with pretrained weights {record['path']}, SHA-256 {record['sha256']}"
            )

    def _differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        yield from super()._differences(checkpoint)
        if self.settings.pretrained is not None and PRETRAINED not in checkpoint["init_args"]:
            yield "without pretrained weights"
