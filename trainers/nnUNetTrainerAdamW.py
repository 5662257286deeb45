"""Adam with decoupled weight decay, the comparison for ``nnUNetTrainerAdamCPR``."""

import torch

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import ADAM_BETAS, NamedTrainer, fuses_steps
from nnunet_cpr.nnunet.classes import with_suffixes
from nnunet_cpr.optimizers import FusedAdam
from nnunet_cpr.optimizers.groups import keep_fused


class nnUNetTrainerAdamW(NamedTrainer):
    """Adam with decoupled weight decay, the comparison for ``nnUNetTrainerAdamCPR``."""

    settings = TrainerName("nnUNetTrainerAdamW")

    def build_optimizer(self):
        if self.baseline is not None:
            return FusedAdam(
                self.network.parameters(), self.initial_lr, betas=ADAM_BETAS, fused=fuses_steps(self)
            )
        optimizer = torch.optim.AdamW(
            self.network.parameters(),
            self.initial_lr,
            betas=ADAM_BETAS,
            weight_decay=self.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )
        return keep_fused(optimizer)


__getattr__ = with_suffixes(nnUNetTrainerAdamW)
