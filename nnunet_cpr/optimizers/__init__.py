"""SGD, Adam and Muon with CPR in place of weight decay."""

from nnunet_cpr.optimizers._base import CPROptimizer
from nnunet_cpr.optimizers.adam_cpr import AdamCPR
from nnunet_cpr.optimizers.muon import Muon
from nnunet_cpr.optimizers.muon_cpr import MuonCPR
from nnunet_cpr.optimizers.sgd_cpr import SGDCPR

__all__ = ["SGDCPR", "AdamCPR", "CPROptimizer", "Muon", "MuonCPR"]
