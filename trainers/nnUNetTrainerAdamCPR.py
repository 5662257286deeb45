"""Adam with CPR, as in the paper's BTCV, Heart and BraTS runs."""

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import ADAM_BETAS, NamedTrainer, fuses_steps
from nnunet_cpr.nnunet.classes import with_suffixes
from nnunet_cpr.optimizers import AdamCPR


class nnUNetTrainerAdamCPR(NamedTrainer):
    """Adam with CPR, as in the paper's BTCV, Heart and BraTS runs."""

    settings = TrainerName("nnUNetTrainerAdamCPR")

    def build_optimizer(self):
        return AdamCPR(
            self.network,
            self.initial_lr,
            betas=ADAM_BETAS,
            fused=fuses_steps(self),
            **self.cpr_settings,
        )


__getattr__ = with_suffixes(nnUNetTrainerAdamCPR)
