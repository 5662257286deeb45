"""Muon with CPR in place of weight decay."""

from typing import ClassVar

from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import with_suffixes
from nnunet_cpr.optimizers import MuonCPR


class nnUNetTrainerMuonCPR(NamedTrainer):
    """Muon with CPR in place of weight decay."""

    settings = TrainerName("nnUNetTrainerMuonCPR")
    muon_options: ClassVar[dict] = {}  # further arguments of Muon, for derived classes

    def build_optimizer(self):
        return MuonCPR(self.network, self.initial_lr, **self.muon_options, **self.cpr_settings)


__getattr__ = with_suffixes(nnUNetTrainerMuonCPR)
