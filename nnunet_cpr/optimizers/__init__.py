"""SGD, Adam and Muon with CPR in place of weight decay, and with any regularization method.

To add an optimizer: write a class that gets CPR and groups from ``groups.cpr_and_groups``, passes the
groups to torch's class and attaches CPR, as :class:`MuonCPR` does. If a kernel can take its step, derive
it from ``fused_step.FusedStep``, as :class:`FusedSGD`, and name the kernel's settings in
``_rule_and_state``.
"""

from nnunet_cpr.optimizers.adam import AdamCPR, FusedAdam
from nnunet_cpr.optimizers.muon import Muon, MuonCPR
from nnunet_cpr.optimizers.sgd import SGDCPR, FusedSGD

__all__ = ["SGDCPR", "AdamCPR", "FusedAdam", "FusedSGD", "Muon", "MuonCPR"]
