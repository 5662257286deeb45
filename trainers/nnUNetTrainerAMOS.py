"""AMOS, whose decay adapts to the model; a weight decay in the name is added to it."""

from nnunet_cpr.baselines import amos
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import with_suffixes


class nnUNetTrainerAMOS(NamedTrainer):
    """AMOS, whose decay adapts to the model; a weight decay in the name is added to it."""

    settings = TrainerName("nnUNetTrainerAMOS")

    def build_optimizer(self):
        return amos(self.network, self.initial_lr, self.settings.weight_decay or 0.0)


__getattr__ = with_suffixes(nnUNetTrainerAMOS)
