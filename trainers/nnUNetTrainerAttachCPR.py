"""CPR attached to the optimizer of another trainer, in place of its weight decay."""

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import with_suffixes


class nnUNetTrainerAttachCPR(NamedTrainer):
    """CPR attached to the optimizer of another trainer, in place of its weight decay."""

    settings = TrainerName("nnUNetTrainerAttachCPR")


__getattr__ = with_suffixes(nnUNetTrainerAttachCPR)
