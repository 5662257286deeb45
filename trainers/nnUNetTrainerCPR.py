"""nnU-Net's SGD with CPR in place of weight decay."""

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.classes import with_suffixes
from nnunet_cpr.nnunet.cpr_trainer import CPRTrainer
from nnunet_cpr.optimizers import SGDCPR


class nnUNetTrainerCPR(CPRTrainer):
    """nnU-Net's SGD with CPR in place of weight decay."""

    settings = TrainerName("nnUNetTrainerCPR")

    def build_optimizer(self):
        return SGDCPR(
            self.network,
            self.initial_lr,
            momentum=self.training.momentum,
            fused=self.is_step_fused,
            **self.cpr_settings,
        )


__getattr__ = with_suffixes(nnUNetTrainerCPR)
