"""nnU-Net's own SGD and weight decay, with suffixes."""

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.composition import with_suffixes


class nnUNetTrainerSGD(NamedTrainer):
    """nnU-Net's own SGD and weight decay, with suffixes."""

    settings = TrainerName("nnUNetTrainerSGD")

    def build_optimizer(self):
        return nnUNetTrainer.configure_optimizers(self)[0]


__getattr__ = with_suffixes(nnUNetTrainerSGD)
