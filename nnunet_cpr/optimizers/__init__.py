"""SGD, Adam and Muon with CPR in place of weight decay, and with any regularization method."""

from nnunet_cpr.optimizers._cpr import CPROptimizer
from nnunet_cpr.optimizers.adam import FusedAdam
from nnunet_cpr.optimizers.adam_cpr import AdamCPR
from nnunet_cpr.optimizers.muon import Muon
from nnunet_cpr.optimizers.muon_cpr import MuonCPR
from nnunet_cpr.optimizers.sgd import FusedSGD
from nnunet_cpr.optimizers.sgd_cpr import SGDCPR

__all__ = ["SGDCPR", "AdamCPR", "CPROptimizer", "FusedAdam", "FusedSGD", "Muon", "MuonCPR"]
