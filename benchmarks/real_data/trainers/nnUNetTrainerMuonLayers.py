"""Muon trainers with other assignments of layers, for the choice of the default."""

from nnunet_cpr.nnunet.trainer import nnUNetTrainerMuon


class nnUNetTrainerMuonEverywhere(nnUNetTrainerMuon):
    muon_options = {"adamw_for": ()}


class nnUNetTrainerMuonNotFirst(nnUNetTrainerMuon):
    muon_options = {"adamw_for": ("first",)}


class nnUNetTrainerMuonNotHead(nnUNetTrainerMuon):
    muon_options = {"adamw_for": ("head",)}


class nnUNetTrainerMuonNotTransposed(nnUNetTrainerMuon):
    muon_options = {"adamw_for": ("first", "head", "depthwise", "transposed")}
