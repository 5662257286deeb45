"""Constrained Parameter Regularization for nnU-Net and for any PyTorch training loop."""

from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.cpr import CPR
from nnunet_cpr.optim import AdamCPR, SGDCPR

__version__ = "0.1.0"

__all__ = ["CPR", "AdamCPR", "KappaIP", "KappaK", "KappaKI0", "KappaWS", "SGDCPR"]
