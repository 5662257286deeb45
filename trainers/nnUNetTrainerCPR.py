"""nnU-Net's SGD with CPR in place of weight decay."""

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer, fuses_steps
from nnunet_cpr.nnunet.classes import with_suffixes
from nnunet_cpr.optimizers import SGDCPR


class nnUNetTrainerCPR(NamedTrainer):
    """nnU-Net's SGD with CPR in place of weight decay."""

    settings = TrainerName("nnUNetTrainerCPR")

    def build_optimizer(self):
        return SGDCPR(
            self.network,
            self.initial_lr,
            momentum=self.training.momentum,
            fused=fuses_steps(self),
            **self.cpr_settings,
        )


__getattr__ = with_suffixes(nnUNetTrainerCPR)
