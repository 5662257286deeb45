"""Seeds of the random number generators, and the threads of a training on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from nnunetv2.utilities.default_n_proc_DA import get_allowed_n_proc_DA
from torch import distributed

from nnunet_cpr.environment import seed_all
from nnunet_cpr.nnunet.commands import CPU_THREADS
from nnunet_cpr.nnunet.parts.part import Part
from nnunet_cpr.refusals import Refusal, positive_integer


class Seeds(Part):
    """Seeds of the network's weights and of each epoch, so that a continued one draws the same."""

    def before(self, arguments: dict[str, Any]) -> None:
        # Some trainers build the network in their own __init__.
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        self._seed(0, rank)

    def begin(self) -> None:
        threads = os.environ.get(CPU_THREADS)
        if self.trainer.device.type == "cpu" and threads:  # for which nnU-Net takes all cores
            try:
                number = int(threads) if threads.isdecimal() else threads
                torch.set_num_threads(positive_integer(CPU_THREADS, number))
            except ValueError as error:
                raise Refusal(str(error)) from error
        self._seed(0, self.trainer.local_rank)  # the network's initial weights

    def start(self) -> None:
        seed = self.trainer.settings.seed
        if seed is not None and self.trainer.device.type == "cuda":
            self.warn(
                f"_seed{seed} does not make this training reproducible: on a GPU each run rounds sums "
                "differently; repeat it with several seeds"
            )
        elif seed is not None and get_allowed_n_proc_DA() != 0:
            self.warn(
                f"_seed{seed} does not make this training reproducible, because processes load the "
                "data; set nnUNet_n_proc_DA=0 if it should be"
            )

    def start_epoch(self) -> None:
        self._seed(1 + self.trainer.current_epoch, self.trainer.local_rank)

    def _seed(self, stream: int, rank: int) -> None:
        if self.trainer.settings.seed is not None:
            seed_all(self.trainer.settings.seed, rank, stream)
