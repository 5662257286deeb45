"""SGD, Adam and Muon with CPR in place of weight decay, and with any regularization method."""

from nnunet_cpr.optimizers.adam_cpr import AdamCPR, FusedAdam
from nnunet_cpr.optimizers.muon import Muon
from nnunet_cpr.optimizers.muon_cpr import MuonCPR
from nnunet_cpr.optimizers.sgd_cpr import SGDCPR, FusedSGD

__all__ = ["SGDCPR", "AdamCPR", "FusedAdam", "FusedSGD", "Muon", "MuonCPR"]
