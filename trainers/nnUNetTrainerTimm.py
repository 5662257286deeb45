"""An optimizer of timm with its weight decay: ``nnUNetTrainerTimm_lion_lr1en4_wd1en1``."""

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import with_suffixes


class nnUNetTrainerTimm(NamedTrainer):
    """An optimizer of timm with its weight decay."""

    settings = TrainerName("nnUNetTrainerTimm")

    def build_optimizer(self):
        return self.build_timm_optimizer(self.weight_decay)


__getattr__ = with_suffixes(nnUNetTrainerTimm)
