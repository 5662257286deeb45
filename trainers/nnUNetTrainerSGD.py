"""nnU-Net's own SGD and weight decay, with suffixes."""

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer, fuses_steps
from nnunet_cpr.nnunet.classes import with_suffixes
from nnunet_cpr.optimizers import FusedSGD


class nnUNetTrainerSGD(NamedTrainer):
    """nnU-Net's own SGD and weight decay, with suffixes."""

    settings = TrainerName("nnUNetTrainerSGD")

    def build_optimizer(self):
        if self.baseline is None and not fuses_steps(self):
            return nnUNetTrainer.configure_optimizers(self)[0]
        return FusedSGD(
            self.network.parameters(),
            self.initial_lr,
            momentum=self.training.momentum,
            nesterov=True,
            weight_decay=self.weight_decay,
            fused=fuses_steps(self),
        )


__getattr__ = with_suffixes(nnUNetTrainerSGD)
