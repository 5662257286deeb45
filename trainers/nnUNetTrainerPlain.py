"""Another trainer with suffixes, the comparison for ``nnUNetTrainerAttachCPR``."""

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import with_suffixes


class nnUNetTrainerPlain(NamedTrainer):
    """Another trainer with suffixes, the comparison for ``nnUNetTrainerAttachCPR``."""

    settings = TrainerName("nnUNetTrainerPlain")


__getattr__ = with_suffixes(nnUNetTrainerPlain)
