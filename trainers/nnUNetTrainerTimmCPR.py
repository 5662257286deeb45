"""An optimizer of timm with CPR in place of weight decay: ``nnUNetTrainerTimmCPR_adopt_ws2000``."""

from nnunet_cpr import timm_optimizers
from nnunet_cpr.cpr import CPR
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.composition import with_suffixes
from nnunet_cpr.nnunet.cpr_trainer import CPRTrainer


class nnUNetTrainerTimmCPR(CPRTrainer):
    """An optimizer of timm with CPR in place of weight decay."""

    settings = TrainerName("nnUNetTrainerTimmCPR")

    def build_optimizer(self):
        optimizer = timm_optimizers.build(
            self.network.parameters(),
            self.settings.timm,
            self.initial_lr,
            momentum=self.settings.momentum,
        )
        return CPR(self.network, **self.cpr_settings).attach(optimizer)


__getattr__ = with_suffixes(nnUNetTrainerTimmCPR)
