"""Muon with decoupled weight decay, the comparison for ``nnUNetTrainerMuonCPR``."""

from typing import ClassVar

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import with_suffixes
from nnunet_cpr.optimizers import Muon


class nnUNetTrainerMuon(NamedTrainer):
    """Muon with decoupled weight decay, the comparison for ``nnUNetTrainerMuonCPR``."""

    settings = TrainerName("nnUNetTrainerMuon")
    muon_options: ClassVar[dict] = {}  # further arguments of Muon, for derived classes

    def build_optimizer(self):
        options = {"weight_decay": self.weight_decay, **self.muon_options}
        return Muon(self.network, self.initial_lr, **options)


__getattr__ = with_suffixes(nnUNetTrainerMuon)
