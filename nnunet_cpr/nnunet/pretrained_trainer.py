"""nnU-Net's trainer that records the pretrained weights with which its training began."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nnunet_cpr.nnunet.checkpoints import one_line
from nnunet_cpr.nnunet.defaults_trainer import DefaultsTrainer
from nnunet_cpr.nnunet.pretrained_weights import PRETRAINED, given_weights, misfit, sha256


class PretrainedWeightsTrainer(DefaultsTrainer):
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
        record = {"path": str(self.__given), "sha256": sha256(self.__given)}
        self.my_init_kwargs[PRETRAINED] = record

    def initialize(self) -> None:
        super().initialize()
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
