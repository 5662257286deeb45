"""An optimizer of timm with CPR in place of weight decay: ``nnUNetTrainerTimmCPR_adopt_ws2000``."""

from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import with_suffixes


class nnUNetTrainerTimmCPR(NamedTrainer):
    """An optimizer of timm with CPR in place of weight decay."""

    settings = TrainerName("nnUNetTrainerTimmCPR")

    def build_optimizer(self):
        optimizer = self.build_timm_optimizer(weight_decay=0.0)
        return CPR(self.network, **self.cpr_settings).attach(optimizer)


__getattr__ = with_suffixes(nnUNetTrainerTimmCPR)
